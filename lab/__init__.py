"""What a notebook imports: experiments, clients, measurement, runs, plots, batch, command line."""
