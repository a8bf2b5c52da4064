// The page of one way to wait: three choices, its figures, and how they moved.

const WAIT_WIDTH = 560;
const WAIT_HEIGHT = 96;
const WAIT_LEFT = 52;

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// A line over the newest measurements, its axis from zero to the largest of them.
class Trace {
  constructor(title, colour, least) {
    this.least = least;
    this.line = svg("polyline", { fill: "none", stroke: colour, "stroke-width": 2 });
    this.dot = svg("circle", { r: 3.5, fill: colour, stroke: "#1b1b1b", "stroke-width": 0.7 });
    this.top = svg("text", { x: WAIT_LEFT - 6, y: 12, "text-anchor": "end" });
    const base = WAIT_HEIGHT - 6;
    this.drawing = svg("svg", {
      viewBox: `0 0 ${WAIT_WIDTH} ${WAIT_HEIGHT}`, class: "rl-trace", role: "img",
      "aria-label": title,
    },
    svg("line", { x1: WAIT_LEFT, x2: WAIT_WIDTH, y1: base, y2: base, stroke: "#595959" }),
    svg("line", { x1: WAIT_LEFT, x2: WAIT_WIDTH, y1: 8, y2: 8, stroke: "#e3e3e3" }),
    svg("text", { x: WAIT_LEFT - 6, y: base + 3, "text-anchor": "end" }, "0"),
    this.top, this.line, this.dot);
    this.root = el("section", { class: "rl-figure", "aria-label": title }, el("h4", {}, title),
      this.drawing);
  }

  show(values, most) {
    const highest = niceAbove(Math.max(...values, this.least));
    const x = (i) => WAIT_LEFT + (WAIT_WIDTH - WAIT_LEFT - 6) * (i / Math.max(1, most - 1));
    const y = (value) => WAIT_HEIGHT - 6 - (WAIT_HEIGHT - 14) * (value / highest);
    this.line.setAttribute("points", values.map((value, i) => `${x(i)},${y(value)}`).join(" "));
    this.top.textContent = highest.toLocaleString("en");
    const last = values.length - 1;
    this.dot.setAttribute("visibility", last < 0 ? "hidden" : "visible");
    if (last >= 0) {
      this.dot.setAttribute("cx", x(last));
      this.dot.setAttribute("cy", y(values[last]));
    }
  }
}

// The next of 1, 2 and 5 times a power of ten.
function niceAbove(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  const step = [1, 2, 5, 10].find((each) => each * power >= value * 0.999);
  return Number((step * power).toPrecision(3));
}

class WaitsPage {
  constructor(model, root, send) {
    this.root = root;
    this.send = send;
    this.wishes = new Wishes(root, send);
    this.isSetUp = true;
    root.setAttribute("aria-label", "One way to wait, live");
    this.controls = new Map();
    this.choices = el("fieldset", {}, el("legend", {}, "What to wait with"));
    this.what = el("p", { class: "rl-what", "aria-live": "polite" });
    this.figures = el("div", { class: "rl-wait-figures" });
    this.message = el("p", { class: "rl-message rl-error", role: "alert" });
    this.message.hidden = true;
    this.us = new Trace("One wait takes, us", "#d55e00", 0.01);
    this.switches = new Trace("Voluntary switches per wait", "#0072b2", 1);
    this.caption = el("p", { class: "rl-faint" });
    root.replaceChildren(
      el("div", { class: "rl-columns" },
        el("div", { class: "rl-left" }, this.choices, this.what),
        el("div", { class: "rl-main" }, this.message, this.figures, this.us.root,
          this.switches.root, this.caption)));
  }

  take(facts) {
    this.wishes.take(facts);
    for (const spec of facts.controls) {
      this.control(spec);
    }
    this.what.textContent = facts.what;
    this.message.hidden = !facts.message;
    this.message.textContent = facts.message;
    this.caption.textContent = facts.caption;
    this.figures.replaceChildren(...facts.figures.flatMap(([name, value, unit]) =>
      [el("div", {}, el("span", { class: "rl-faint" }, name),
        el("strong", {}, value, el("small", {}, ` ${unit}`)))]));
    this.us.show(facts.us, facts.most);
    this.switches.show(facts.switches, facts.most);
    this.root.dataset.taken = facts.taken;
    requestAnimationFrame(() => this.send({ kind: "seen" }));
  }

  control(spec) {
    let known = this.controls.get(spec.name);
    if (known === undefined) {
      known = new ChoiceControl(spec, this.wishes);
      this.controls.set(spec.name, known);
      this.choices.append(known.root);
    }
    known.options(spec);
    known.show(spec.value);
  }

  lost(text) {
    this.message.hidden = false;
    this.message.textContent = text;
    for (const control of this.root.querySelectorAll("select")) {
      control.disabled = true;
    }
  }

  remove() {
    this.root.replaceChildren();
  }
}

PAGES.waits = WaitsPage;
