// Small things that both pages are made of.

let ringlabIds = 0;

function newId(name) {
  ringlabIds += 1;
  return `ringlab-${name.replace(/\W+/g, "-")}-${ringlabIds}`;
}

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) {
      made.addEventListener(name.slice(2), value);
    } else if (value !== undefined && value !== false) {
      made.setAttribute(name, value === true ? "" : value);
    }
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function button(text, help, pressed, attributes = {}) {
  return el("button", { type: "button", title: help, onclick: pressed, ...attributes }, text);
}

function legendOf(keys) {
  const entries = keys.map(({ label, colour, shape }) => {
    const swatch = el("span", { class: "rl-swatch", "aria-hidden": "true" });
    swatch.style.borderTop = `3px ${shape === "dashed" ? "dashed" : "solid"} ${colour}`;
    return el("li", {}, swatch, label);
  });
  return el("ul", { class: "rl-legend", "aria-label": "Legend" }, ...entries);
}

const BYTES = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];

function spoken(value, unit) {
  if (unit === "bytes") {
    for (const [size, name] of BYTES) {
      if (value >= size && value % size === 0) {
        return `${value / size} ${name}`;
      }
    }
  }
  return `${value.toLocaleString("en")} ${unit}`.trim();
}

// At once, and then at most every so many ms, the last one always.
function throttled(milliseconds, work) {
  let timer = null;
  let waiting = null;
  return (...given) => {
    if (timer !== null) {
      waiting = given;
      return;
    }
    work(...given);
    timer = setTimeout(function again() {
      timer = null;
      if (waiting !== null) {
        const late = waiting;
        waiting = null;
        work(...late);
        timer = setTimeout(again, milliseconds);
      }
    }, milliseconds);
  };
}

// The wishes of one page: what is asked for goes out as a numbered message, and what the kernel says
// comes with the number of the last one that it knew. However late that is, what it said before it
// knew the newest wish is no news.
class Wishes {
  constructor(root, send) {
    this.view = root.dataset.view;
    this.send = send;
    this.heard = 0;
  }

  set(name, value) {
    return this.send({ kind: "set", name, value }) ?? 0;
  }

  take(facts) {
    if (facts.heard?.view === this.view) {
      this.heard = facts.heard.count;
    }
  }
}

// A number: a slider that steps through sensible values, and a field for exact ones.
class NumberControl {
  constructor(spec, wishes) {
    this.spec = spec;
    this.wishes = wishes;
    this.asked = 0; // the message that asked for what is shown; none yet: Infinity
    this.typing = false;
    const field = newId(spec.name);
    const note = newId("note");
    this.note = el("div", { id: note, class: "rl-refused", role: "alert" });
    this.slider = el("input", {
      type: "range", min: 0, max: spec.stops.length - 1, step: 1, class: "rl-slider",
      "aria-label": `${spec.label}, slider`, title: spec.help, "data-name": spec.name,
    });
    const sent = throttled(80, (value) => {
      this.asked = wishes.set(spec.name, value);
    });
    this.slider.addEventListener("input", () => {
      const value = this.spec.stops[Number(this.slider.value)];
      this.asked = Infinity;
      this.write(value);
      sent(value);
    });
    this.text = el("input", {
      id: field, type: "text", class: "rl-number", inputmode: "decimal", autocomplete: "off",
      "aria-describedby": note, title: `${spec.allowed}. ${spec.help}`, "data-name": spec.name,
    });
    this.text.addEventListener("input", () => {
      this.typing = true;
    });
    this.text.addEventListener("change", () => {
      this.typing = false;
      this.asked = wishes.set(spec.name, this.text.value);
    });
    this.text.addEventListener("blur", () => {
      this.typing = false;
      this.show(this.known);
    });
    this.root = el("div", { class: "rl-control" },
      el("div", { class: "rl-head" }, el("label", { for: field }, spec.label),
        el("small", {}, spec.effect)),
      el("div", { class: "rl-row" }, this.slider, this.text,
        el("span", { class: "rl-unit" }, spec.unit)),
      this.note);
    this.show(spec.value);
  }

  write(value) {
    this.text.value = String(value);
    this.slider.setAttribute("aria-valuetext", spoken(Number(value), this.spec.unit));
  }

  show(value) {
    this.known = value;
    if (this.asked > this.wishes.heard || this.typing) {
      return;
    }
    const distance = this.spec.stops.map((stop) => Math.abs(stop - value));
    this.slider.value = String(distance.indexOf(Math.min(...distance)));
    if (!this.refusedText) {
      this.write(value);
    }
  }

  refuse(text) {
    this.refusedText = text ?? "";
    this.note.textContent = this.refusedText;
    this.text.toggleAttribute("aria-invalid", Boolean(text));
    if (text) {
      this.text.setAttribute("aria-invalid", "true");
    }
  }
}

// One of a few words.
class ChoiceControl {
  constructor(spec, wishes, describe = () => {}) {
    this.spec = spec;
    this.wishes = wishes;
    this.asked = 0;
    const field = newId(spec.name);
    const note = newId("note");
    this.note = el("div", { id: note, class: "rl-refused", role: "alert" });
    this.select = el("select", {
      id: field, "aria-describedby": note, title: spec.help, "data-name": spec.name,
    });
    this.select.addEventListener("change", () => {
      describe(this);
      this.asked = wishes.set(spec.name, this.select.value);
    });
    this.select.addEventListener("focus", () => describe(this));
    this.root = el("div", { class: "rl-control rl-choice" },
      el("div", { class: "rl-row" }, el("label", { for: field, title: spec.help }, spec.label),
        this.select),
      this.note);
    this.options(spec);
    this.show(spec.value);
  }

  // Only what changed: somebody may be choosing by typing.
  options(spec) {
    const shown = JSON.stringify([spec.choices,
      spec.choices.some((choice) => choice.value === spec.value) || spec.value]);
    this.spec = spec;
    if (shown === this.shown) {
      return;
    }
    this.shown = shown;
    const options = spec.choices.map((choice) =>
      el("option", { value: choice.value, title: choice.what }, choice.label));
    if (!spec.choices.some((choice) => choice.value === spec.value)) {
      options.unshift(el("option", { value: spec.value }, spec.value));
    }
    this.select.replaceChildren(...options);
  }

  show(value) {
    if (this.asked <= this.wishes.heard) {
      this.select.value = String(value);
    }
  }

  what() {
    const chosen = this.spec.choices.find((choice) => choice.value === this.select.value);
    const help = this.spec.help ? `${this.spec.help}: ` : "";
    return `${this.spec.label}: ${help}${chosen?.what || this.select.value}`;
  }

  refuse(text) {
    this.note.textContent = text ?? "";
  }
}
