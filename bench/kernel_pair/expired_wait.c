	/* Nothing came and the time is up: neither a timer nor a sleep would change that. */
	if (iowq->timeout != KTIME_MAX && !ktime_after(iowq->timeout, io_get_time(ctx)))
		return -ETIME;

