// The picture: BokehJS fetched once a page, a layout embedded once, rows appended to one source.

const BOKEH_PATIENCE_MS = 6000;

// BokehJS comes over the comm, from the package that the kernel has installed. One widget of a page
// asks for it; the others wait for what it gets, and ask themselves when that takes too long.
const bokeh = {
  here() {
    return globalThis.Bokeh !== undefined && globalThis.Bokeh.embed !== undefined;
  },
  // Whether a view need not ask.
  claimed() {
    const asked = globalThis.__ringlabBokehAsked ?? 0;
    if (this.here() || performance.now() - asked < BOKEH_PATIENCE_MS && asked > 0) {
      return true;
    }
    globalThis.__ringlabBokehAsked = performance.now();
    return false;
  },
  take(buffer) {
    if (!this.here()) {
      const script = document.createElement("script");
      script.textContent = new TextDecoder().decode(buffer);
      document.head.append(script);
      script.remove();
    }
  },
  async ready(again) {
    for (let tries = 1; !this.here(); tries++) {
      await new Promise((done) => setTimeout(done, 30));
      if (tries % 220 === 0) {
        again();
      }
    }
    return globalThis.Bokeh;
  },
};

class Picture {
  constructor(place, told, shown) {
    this.place = place;
    this.told = told; // called with messages for the kernel
    this.shown = shown; // what is called with a selected span, and with the marks
    this.queue = [];
    this.drawing = false;
    this.source = null;
    this.follow = true;
    this.newest = 0;
    this.seenAt = 0;
    this.painted = 0; // rows that are in the page now; a test reads it
  }

  async setup(message) {
    const Bokeh = globalThis.Bokeh;
    this.message = message;
    this.columns = message.columns;
    const roots = {};
    const sections = message.plots.map((plot) => {
      const target = el("div", { class: "rl-plot" });
      roots[plot.id] = target;
      const section = el("section", { class: `rl-figure rl-${plot.name}`, "aria-label": plot.title },
        el("h4", {}, plot.title), legendOf(plot.legend), target);
      return section;
    });
    this.place.replaceChildren(...sections);
    const item = { docid: message.docid, roots, root_ids: Object.keys(roots) };
    const [views] = await Bokeh.embed.embed_items(message.docs, [item]);
    const document_ = views.roots[0].model.document;
    this.source = document_.get_model_by_name("rows");
    this.marks = document_.get_model_by_name("marks");
    this.range = document_.get_model_by_name("time");
    this.figures = new Map(message.plots.map((plot, i) => [plot.name, document_.roots()[i]]));
    this.empty();
    this.watchSelection();
    this.watchSight(sections);
    this.scale("log");
    this.views = views;
    this.later();
  }

  empty() {
    const names = [...this.columns, ...this.message.logs.map((name) => `${name}_log`)];
    this.source.data = Object.fromEntries(names.map((name) => [name, new Float64Array(0)]));
    this.marks.data = { id: [], t: [], name: [], text: [], lane: [] };
    this.labelled = 0; // up to when the labels reach
  }

  // A plot that is out of sight is not drawn: it would hold up those that somebody looks at.
  watchSight(sections) {
    const figures = [...this.figures.values()];
    this.sight = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        figures[sections.indexOf(entry.target)].hold_render = !entry.isIntersecting;
      }
    }, { rootMargin: "60px" });
    sections.forEach((section) => this.sight.observe(section));
  }

  watchSelection() {
    for (const figure of this.figures.values()) {
      figure.on_event("selectiongeometry", (event) => this.selected(event));
    }
  }

  zoom() {
    if (this.span !== undefined) {
      this.follow = false;
      this.range.setv({ start: this.span[0], end: this.span[1] });
    }
  }

  goOn() {
    this.follow = true;
    this.move();
  }

  selected(event) {
    const { geometry, final } = event;
    if (final && geometry.type === "rect" && geometry.x1 > geometry.x0) {
      this.chosen(geometry.x0, geometry.x1);
    }
  }

  // However it was selected, it is shaded in every plot.
  chosen(from, to) {
    for (const { toolbar, y_range } of this.figures?.values() ?? []) {
      const overlay = toolbar.tools.find((tool) => tool.type === "BoxSelectTool")?.overlay;
      overlay?.update({ left: from, right: to, top: y_range.end, bottom: y_range.start });
    }
    this.span = [from, to];
    this.shown.span(from, to);
    this.told({ kind: "span", from, to });
  }

  scale(name) {
    for (const [plot, figure] of this.figures ?? []) {
      const scale = plot.split("-")[1];
      if (scale !== undefined) {
        figure.visible = scale === name;
        this.place.querySelector(`.rl-${plot}`).hidden = scale !== name;
      }
    }
  }

  rows(message, buffer) {
    const bytes = buffer.buffer.slice(buffer.byteOffset, buffer.byteOffset + buffer.byteLength);
    if (message.reset) {
      this.queue = [];
    }
    this.queue.push({ message, values: new Float64Array(bytes) });
    this.later();
  }

  // What arrives between two animation frames is drawn as one.
  later() {
    if (!this.drawing && this.source !== null && this.queue.length > 0) {
      this.drawing = true;
      requestAnimationFrame(() => {
        this.drawing = false;
        this.draw(this.queue.splice(0));
      });
    }
  }

  draw(frames) {
    if (this.source === null) {
      return; // it was removed meanwhile
    }
    const columns = Object.fromEntries(this.columns.map((name) => [name, []]));
    for (const { message, values } of frames) {
      if (message.reset) {
        this.empty();
        this.newest = 0;
        this.follow = true;
      }
      this.columns.forEach((name, i) => {
        columns[name].push(values.subarray(i * message.count, (i + 1) * message.count));
      });
      this.addMarks(message.marks);
    }
    const joined = Object.fromEntries(
      Object.entries(columns).map(([name, parts]) => [name, join(parts)]));
    for (const name of this.message.logs) {
      joined[`${name}_log`] = joined[name].map((value) => Math.max(value, this.message.floor));
    }
    const last = frames[frames.length - 1].message;
    if (joined.t.length > 0) {
      this.source.stream(joined, last.kept);
      this.newest = joined.t[joined.t.length - 1];
      this.painted = this.source.data.t.length;
    }
    this.move();
    this.place.dataset.rows = String(this.painted);
    this.place.dataset.seq = String(last.seq);
    this.acknowledge(last.seq);
  }

  // At most one message a second tells the kernel that somebody sees the frames, the last one too.
  acknowledge(seq) {
    this.seq = seq;
    if (this.acknowledging) {
      return;
    }
    this.acknowledging = true;
    const wait = Math.max(0, 1000 - (performance.now() - this.seenAt));
    setTimeout(() => requestAnimationFrame(() => {
      this.acknowledging = false;
      this.seenAt = performance.now();
      this.told({ kind: "seen", seq: this.seq });
    }), wait);
  }

  // A label has room up to the next mark in its lane; what does not fit is seen by pointing at it.
  label(data) {
    const pixels = Math.max(200, (this.place.clientWidth || 600) - 110);
    const letters = pixels / this.message.seconds / 5.6; // a second
    this.labelled = 0;
    data.text = data.name.map((name, i) => {
      const next = data.lane.indexOf(data.lane[i], i + 1);
      const room = next < 0 ? Infinity : Math.floor((data.t[next] - data.t[i]) * letters) - 3;
      if (next < 0) {
        this.labelled = Math.max(this.labelled, data.t[i] + (name.length + 2) / letters);
      }
      return name.length <= room ? name : room < 4 ? "" : `${name.slice(0, room - 1)}…`;
    });
  }

  addMarks(marks) {
    if (marks.length === 0) {
      return;
    }
    const data = { ...this.marks.data };
    for (const name of Object.keys(data)) {
      data[name] = [...data[name]];
    }
    for (const mark of marks) {
      const at = data.id.indexOf(mark.id);
      if (at >= 0) {
        data.name[at] = mark.text;
      } else {
        data.id.push(mark.id);
        data.t.push(mark.t);
        data.name.push(mark.text);
        data.lane.push(3 - mark.id % 4);
        this.newest = Math.max(this.newest, mark.t);
      }
    }
    this.label(data);
    this.marks.data = data;
    this.shown.marks(data);
  }

  move() {
    if (!this.follow) {
      return;
    }
    // Room ahead, for the label of what was done last.
    const { seconds } = this.message;
    const label = Math.min(this.labelled, this.newest + seconds / 2);
    const end = Math.max(this.newest + seconds / 8, seconds, label);
    this.range.setv({ start: end - this.message.seconds, end });
  }

  remove() {
    this.source = null;
    this.sight?.disconnect();
    for (const view of this.views?.roots ?? []) {
      view.remove();
    }
  }
}

function join(parts) {
  if (parts.length === 1) {
    return parts[0];
  }
  const joined = new Float64Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    joined.set(part, at);
    at += part.length;
  }
  return joined;
}
