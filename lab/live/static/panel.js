// The page of the live panel. It holds no facts of its own, and knows no engine: the kernel tells
// what there is and how it is called, this shows it.

const STATUS = {
  live: "live", paused: "paused: samples are kept", dark: "dark window: nothing is streamed",
};

class PanelPage {
  constructor(model, root, send) {
    this.model = model;
    this.send = send;
    this.wishes = new Wishes(root, send);
    this.controls = new Map();
    this.facts = {};
    this.root = root;
    this.build();
    this.picture = new Picture(this.plots, send, {
      span: (from, to) => this.showSpan(from, to), marks: (data) => this.showMarks(data),
    });
  }

  build() {
    this.state = el("span", { class: "rl-state" }, "opening");
    this.reason = el("span", { class: "rl-reason" });
    this.status = el("span", { class: "rl-chip", role: "status" }, "waiting for the kernel");
    this.cost = el("p", { class: "rl-faint" });
    this.pause = button("pause", "Stop the picture; no sample is lost", () =>
      this.send({ kind: "pause", on: !this.facts.paused }), { "aria-pressed": "false" });
    this.scale = button("linear scale", "Rates on a linear or a logarithmic axis", () => {
      const linear = this.scale.textContent.startsWith("linear");
      this.picture.scale(linear ? "linear" : "log");
      this.scale.textContent = linear ? "log scale" : "linear scale";
    });
    this.message = el("p", { class: "rl-message", role: "status", "aria-live": "polite" });
    this.presets = el("div", { class: "rl-presets", role: "group", "aria-label": "Arms" });
    this.quick = el("div", { class: "rl-presets", role: "group", "aria-label": "Policies" });
    this.watch = el("p", { class: "rl-watch", "aria-live": "polite" });
    this.left = el("div", { class: "rl-left" });
    this.buttons = el("div",
      { class: "rl-buttons", role: "group", "aria-label": "What clients do" });
    this.connections = el("div", { class: "rl-strip" });
    this.plots = el("div", { class: "rl-plots" });
    this.zoom = button("zoom to span", "Show the selected span alone", () => this.picture.zoom());
    this.following = button("follow", "The newest again, moving on", () =>
      this.picture.goOn());
    this.span = el("p", { class: "rl-span", "aria-live": "polite" },
      "Drag over a plot, or give two times, to select a span: its figures, from every sample, " +
      "stand here.");
    const note = newId("span");
    this.spanNote = el("div", { id: note, class: "rl-refused", role: "alert" });
    this.ends = ["from", "to"].map((end) => el("input", {
      type: "text", class: "rl-number rl-second", inputmode: "decimal", autocomplete: "off",
      "aria-label": `span ${end}, in seconds since the panel was opened`,
      title: `The span ${end}, in seconds since the panel was opened`, "data-span": end,
      "aria-describedby": note,
      onchange: () => this.select(),
    }));
    this.marks = el("ol", { "aria-label": "What was done" });
    this.listed = el("summary", {}, "what was done, as a list");
    this.table = el("div", { class: "rl-table" });
    this.root.replaceChildren(
      el("header", { class: "rl-top" }, this.state, this.reason),
      el("div", { class: "rl-arms" }, el("strong", {}, "Arms"), this.presets,
        el("span", { class: "rl-right" }, this.status, this.pause, this.scale)),
      this.quick, this.watch,
      el("div", { class: "rl-columns" }, this.left,
        el("div", { class: "rl-main" }, this.buttons, this.message, this.connections, this.plots,
          el("div", { class: "rl-row rl-below" }, "Span", this.ends[0], "to", this.ends[1], "s",
            this.zoom, this.following),
          this.spanNote, this.span, el("details", { class: "rl-marks" }, this.listed, this.marks),
          this.cost)),
      this.table);
  }

  makeButtons(buttons, size) {
    this.size = el("input", {
      type: "text", value: String(size), class: "rl-number", "aria-label": "bytes to read",
      title: "bytes to read", inputmode: "numeric",
    });
    for (const { action, label, what } of buttons) {
      this.buttons.append(button(label || action, what, () => this.press(action),
        { "data-action": action }));
      if (action === "read") {
        this.buttons.append(this.size);
      }
    }
    this.buttons.append(
      button("measure this", "A real run of these settings: idle, stall, drain, in the dark",
        () => this.press("measure"), { class: "rl-primary", "data-action": "measure" }),
      button("copy parameters", "The papermill parameters and the command that repeat it",
        () => this.copy()));
  }

  press(name) {
    if (name !== "read") {
      this.send({ kind: "do", action: name });
      return;
    }
    this.send({ kind: "do", action: "read", size: this.size.value.replaceAll(",", "") });
  }

  // The span that the two fields say, once both do.
  select() {
    const [from, to] = this.ends.map((end) => (end.value.trim() === "" ? NaN : Number(end.value)));
    const given = this.ends.every((end) => end.value.trim() !== "");
    const good = from < to;
    for (const end of this.ends) {
      end.setAttribute("aria-invalid", String(given && !good));
    }
    this.spanNote.textContent = given && !good ? `a span from ${this.ends[0].value} to ` +
      `${this.ends[1].value} is not allowed: give two times in seconds, the earlier one first` : "";
    if (good) {
      this.picture.chosen(from, to);
    }
  }

  // However it was selected.
  showSpan(from, to) {
    [from, to].forEach((value, i) => {
      this.ends[i].value = value.toFixed(1);
      this.ends[i].setAttribute("aria-invalid", "false");
    });
    this.spanNote.textContent = "";
  }

  // What the plot of marks shows, in words and in full; each selects what followed it.
  showMarks({ t, name }) {
    this.listed.textContent = `what was done, as a list (${t.length})`;
    this.marks.replaceChildren(...t.map((at, i) => el("li", {}, button(
      `${at.toFixed(1)} s: ${name[i]}`, "Select the span from here to what was done next",
      () => this.picture.chosen(at, t[i + 1] ?? Math.max(this.picture.newest, at + 0.1))))));
  }

  async copy() {
    const text = this.facts.command ?? "";
    try {
      await navigator.clipboard.writeText(text);
      this.say({ error: false, text: `copied: ${text.split("\n").pop().replace(/^# /, "")}` });
    } catch {
      this.say({ error: false, text: "The browser refused its clipboard; copy from here:" });
      this.message.append(el("pre", {}, text));
    }
  }

  async setup(message) {
    if (this.isSetUp) {
      return;
    }
    this.isSetUp = true;
    this.makeButtons(message.buttons, message.size);
    this.makeControls(message);
    await bokeh.ready(() => this.send({ kind: "hello", bokeh: false }));
    await this.picture.setup(message);
    this.root.dataset.ready = "yes";
  }

  makeControls(message) {
    this.words = message.words;
    if (message.wide) {
      this.connections.classList.add("rl-wide");
      this.left.parentElement.before(this.connections);
    }
    this.arms = new Map(message.controls.map((spec) => [spec.name, spec.arms]));
    const numbers = el("fieldset", {}, el("legend", {}, message.words.settings));
    for (const spec of message.controls) {
      const control = spec.choices === undefined
        ? new NumberControl(spec, this.wishes) : new ChoiceControl(spec, this.wishes);
      this.controls.set(spec.name, control);
      numbers.append(control.root);
    }
    this.auto = el("input", { type: "checkbox", id: newId("auto") });
    this.auto.addEventListener("change", () =>
      this.send({ kind: "auto", on: this.auto.checked }));
    numbers.append(el("div", { class: "rl-row rl-auto" }, this.auto,
      el("label", { for: this.auto.id }, "apply at once: reconnect and ask again")));
    this.policies = el("fieldset", {}, el("legend", {}, "Policy, from the next iteration on"));
    this.what = el("p", { class: "rl-what", "aria-live": "polite" },
      "What each choice means is said here.");
    this.left.replaceChildren(numbers, this.policies);
    this.presets.replaceChildren(...message.presets.map((preset) =>
      button(preset.arm, preset.what, () =>
        this.send({ kind: "do", action: "preset", arm: preset.arm }), { "data-arm": preset.arm })));
    this.makeQuick(message.quick);
    this.apply(this.facts);
  }

  // The chosen arm anew, under another policy.
  makeQuick(policies) {
    if (policies.length > 0) {
      this.quick.replaceChildren(el("strong", {}, "Anew under"), ...policies.map(({ name, what }) =>
        button(name, what, () => this.send({
          kind: "do", action: "preset", arm: this.facts.arm, policy: name,
        }), { "data-quick": name })));
    }
  }

  take(facts) {
    Object.assign(this.facts, facts);
    this.apply(facts);
  }

  apply(facts) {
    this.wishes.take(facts);
    const answered = facts.heard !== undefined || facts.refused !== undefined;
    if (facts.strip !== undefined) {
      this.showStrip(facts.strip);
    }
    if (facts.refused !== undefined) {
      for (const [name, control] of this.controls) {
        control.refuse(facts.refused[name]);
      }
      this.size?.setAttribute("aria-invalid", String(facts.refused.size !== undefined));
    }
    if (facts.values !== undefined || answered) {
      for (const [name, value] of Object.entries(this.facts.values ?? {})) {
        this.controls.get(name)?.show(value);
      }
    }
    if (this.policies !== undefined && this.facts.policy !== undefined &&
        (facts.policy !== undefined || answered)) {
      this.showPolicy(this.facts.policy);
    }
    if (facts.message) {
      this.say(facts.message);
    }
    this.applySimple(facts);
  }

  applySimple(facts) {
    const text = (name, place) => {
      if (facts[name] !== undefined) {
        place.textContent = facts[name];
      }
    };
    text("watch", this.watch);
    if (facts.span) {
      this.span.textContent = facts.span;
    }
    if (facts.table !== undefined) {
      this.table.innerHTML = facts.table;
    }
    if (facts.auto !== undefined && this.auto !== undefined) {
      this.auto.checked = facts.auto;
    }
    if (facts.paused !== undefined) {
      this.pause.textContent = facts.paused ? "go on" : "pause";
      this.pause.setAttribute("aria-pressed", String(facts.paused));
    }
    if (facts.arm !== undefined) {
      for (const made of this.presets.children) {
        made.setAttribute("aria-pressed", String(made.dataset.arm === facts.arm));
      }
      for (const [name, arms] of this.arms ?? []) {
        this.controls.get(name).root.hidden = arms.length > 0 && !arms.includes(facts.arm);
      }
    }
    if (facts.policy !== undefined) {
      for (const made of this.quick.querySelectorAll("button")) {
        made.setAttribute("aria-pressed", String(made.dataset.quick === facts.policy.name));
      }
    }
    this.showStatus();
  }

  showStatus() {
    const { busy, status, life, cost, hz, lost, running } = this.facts;
    const words = (life === "open" ? "" : life) ||
      (busy ? `${busy} …` : STATUS[status] ?? status ?? "");
    this.status.textContent = this.old ? this.old.chip : words;
    this.root.dataset.status = this.old ? this.old.words : words;
    this.cost.textContent = cost === undefined ? ""
      : `${hz} frames a second while something changes. This panel costs ${cost} % of a core in ` +
        `the kernel process; ${lost} samples lost.`;
    const dead = Boolean(this.old) || life !== "open";
    const measuring = (busy ?? "").startsWith("measur");
    for (const made of this.root.querySelectorAll("button, input, select")) {
      made.disabled = dead || (measuring && made.dataset.action !== undefined);
    }
    const again = this.buttons.querySelector('[data-action="start again"]');
    again?.classList.toggle("rl-primary", running === false && !dead);
  }

  showStrip(strip) {
    this.state.textContent = `${strip.mark} ${strip.state}`;
    this.state.style.background = strip.colour;
    this.state.style.color = inkOn(strip.colour);
    this.state.dataset.state = strip.state;
    this.reason.textContent = strip.reason;
    this.reason.title = strip.reason;
    const { columns } = strip;
    const what = this.words?.rows ?? "row";
    const rows = strip.rows.length > 0 ? strip.rows : [null];
    const body = rows.map((row) => el("tr", {},
      el("th", { scope: "row" }, row === null ? `no ${what}` : row.name),
      ...columns.map((column) => (row === null ? el("td", {}, "·") : cellOf(column, row)))));
    const more = strip.more ? [el("caption", {}, `and ${strip.more} more ${what}s`)] : [];
    const wait = strip.wait.flatMap(([name, value], i) =>
      [i ? `, ${name} ` : name ? `${name} ` : "", el("strong", {}, value || "·")]);
    this.connections.replaceChildren(el("p", { class: "rl-wait" }, "The wait: ", ...wait),
      el("table", { "aria-label": `The wait, and each ${what}` }, ...more,
        el("thead", {}, el("tr", {}, el("th", { scope: "col" }, this.words?.head ?? ""),
          ...columns.map((column) => el("th", {
            scope: "col", title: column.what || undefined,
            class: typeof rows[0]?.[column.name] === "string" ? "rl-words" : undefined,
          }, column.label)))),
        el("tbody", {}, ...body)));
  }

  showPolicy(policy) {
    if (this.policies.children.length === 1) {
      for (const spec of policy.specs) {
        const control = new ChoiceControl(spec, this.wishes, (which) => {
          this.what.textContent = which.what();
        });
        this.controls.set(spec.name, control);
        this.policies.append(control.root);
      }
      this.policies.append(this.what);
    }
    for (const spec of policy.specs) {
      const control = this.controls.get(spec.name);
      control.options(spec);
      control.show(spec.value);
    }
  }

  say({ error, text }) {
    this.message.className = error ? "rl-message rl-error" : "rl-message";
    this.message.setAttribute("role", error ? "alert" : "status");
    this.message.textContent = text;
  }

  cut(words, final) {
    this.old = words && { words, chip: final ? "the kernel has gone" : "no word" };
    this.showStatus();
  }

  remove() {
    this.picture.remove();
  }
}

// Yes or nothing, a number, or words; behind a number of something that fills, a bar.
function cellOf(column, row) {
  const value = row[column.name];
  const words = typeof value === "boolean" ? (value ? "yes" : "·")
    : typeof value !== "number" ? value : value < 0 ? "·" : value.toLocaleString("en");
  const cell = el("td", { class: typeof value === "string" ? "rl-words" : undefined }, words);
  if (column.most > 0) {
    cell.classList.add("rl-fill");
    cell.style.setProperty("--rl-fill", `${Math.min(100, 100 * value / column.most)}%`);
  }
  if (typeof value === "string" && value.endsWith(": active")) {
    cell.classList.add("rl-active");
  }
  return cell;
}

function inkOn(colour) {
  const parts = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16) / 255);
  const linear = parts.map((part) =>
    (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  const light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return (light + 0.05) / 0.05 >= 1.05 / (light + 0.05) ? "#000000" : "#FFFFFF";
}
