// The page of the stepper: buttons, and the state that the kernel has put into words.

class StepperPage {
  constructor(model, root, send) {
    this.root = root;
    this.send = send;
    this.isSetUp = true;
    this.build();
  }

  build() {
    this.phases = el("div", { class: "rl-buttons", role: "group", "aria-label": "The loop" });
    this.events = this.makeEvents();
    this.message = el("p", { class: "rl-message rl-error", role: "alert" });
    this.message.hidden = true;
    this.automaton = el("div", { class: "rl-automaton" });
    this.state = el("div", { class: "rl-strip", "aria-live": "polite" });
    this.history = el("ol", { class: "rl-history", start: "0", "aria-label": "What was done" });
    this.policies = el("fieldset", {}, el("legend", {}, "Policy, switched in the middle"));
    this.what = el("p", { class: "rl-what", "aria-live": "polite" }, "What each choice means is " +
      "said here.");
    this.controls = new Map();
    this.root.replaceChildren(
      this.phases, this.events, this.message,
      el("div", { class: "rl-columns" },
        el("div", { class: "rl-left" }, this.policies,
          el("fieldset", {}, el("legend", {}, "What was done (go to any of it)"), this.history)),
        el("div", { class: "rl-main" }, this.automaton, this.state)));
  }

  makeEvents() {
    const number = (label, value) => el("input", {
      type: "text", class: "rl-number", inputmode: "numeric", value, "aria-label": label,
    });
    this.slot = el("select", { "aria-label": "connection" });
    this.size = number("bytes of the response", "3145728");
    this.room = number("bytes that the socket takes of the handler's write", "100000");
    this.part = number("bytes of a short completion", "1");
    this.route = el("select", { "aria-label": "route" },
      el("option", {}, "async"), el("option", {}, "sync"));
    this.how = el("select", { "aria-label": "how the SEND completes" });
    const slot = () => this.slot.value || "0";
    const act = (action, more = () => ({})) => () => this.send({ kind: "do", action, ...more() });
    const group = (label, ...children) =>
      el("div", { class: "rl-buttons", role: "group", "aria-label": label },
        el("strong", {}, label), ...children);
    return el("div", {},
      group("Client", button("connect", "A client connects", act("connect")),
        el("span", { class: "rl-unit" }, "connection"), this.slot,
        button("request", "It sends one GET", act("request", () =>
          ({ slot: slot(), size: this.size.value, route: this.route.value }))),
        this.route, this.size, el("span", { class: "rl-unit" }, "bytes"),
        button("half-close", "It sends FIN", act("half-close", () => ({ slot: slot() }))),
        button("reset", "It sends RST", act("reset", () => ({ slot: slot() })))),
      group("Handler", button("runs", "A handler thread runs to its end",
        act("handler", () => ({ slot: slot(), room: this.room.value }))),
      button("begins", "It takes the lock", act("handler begins", () => ({ slot: slot() }))),
      button("ends", "It answers and hands back",
        act("handler ends", () => ({ slot: slot(), room: this.room.value }))),
      el("span", { class: "rl-unit" }, "the socket takes"), this.room,
      el("span", { class: "rl-unit" }, "bytes")),
      group("Kernel", el("span", { class: "rl-unit" }, "the SEND completes"), this.how, this.part,
        el("span", { class: "rl-unit" }, "bytes"),
        button("complete", "Post that completion", act("complete", () =>
          ({ slot: slot(), how: this.how.value, size: this.part.value }))),
        button("poke", "A completion of nobody's", act("poke")),
        button("stop flag", "The modelled stop", act("stop"))));
  }

  take(facts) {
    this.facts = facts;
    this.automaton.innerHTML = facts.automaton;
    this.state.innerHTML = facts.state;
    this.message.hidden = !facts.message;
    this.message.textContent = facts.message;
    this.showPhases(facts);
    this.showChoices(facts);
    this.showHistory(facts);
    this.showPolicy(facts.policy);
    this.root.dataset.condition = facts.condition;
    this.root.dataset.at = facts.at;
    this.root.dataset.ready = "yes";
  }

  // Made once: a button that is replaced between press and release swallows the click.
  makePhases(facts) {
    const act = (action) => () => this.send({ kind: "do", action });
    const go = (by) => () => this.send({ kind: "go", number: this.facts.at + by });
    const made = (step, words, help, pressed) =>
      button(words, help, pressed, { "data-step": step, "data-action": step });
    this.phases.replaceChildren(
      made("back", "back", "Undo the last action", go(-1)),
      made("forward", "forward", "Do it again", go(1)),
      ...facts.phases.map(([name, words]) => made(name, words, words, act(name))),
      made("iterate", "whole iteration", "All phases up to the decision", act("iterate")),
      ...facts.fixtures.map((name) => made(name, `fixture: ${name}`,
        "The founding report's fixture, up to its state", act(name))),
      made("clear", "clear", "Begin again", act("clear")));
  }

  showPhases(facts) {
    if (this.phases.children.length === 0) {
      this.makePhases(facts);
    }
    const had = document.activeElement;
    const names = facts.phases.map(([name]) => name);
    for (const made of this.phases.children) {
      const { step } = made.dataset;
      made.classList.toggle("rl-primary", step === facts.next);
      made.disabled = (step === "back" && facts.at === 0) ||
        (step === "forward" && facts.at + 1 >= facts.history.length) ||
        (names.includes(step) && step !== facts.next);
    }
    // The button that was pressed may be disabled now: the keyboard goes on with the next phase.
    if (had?.disabled && this.phases.contains(had)) {
      this.phases.querySelector(".rl-primary").focus();
    }
  }

  showChoices(facts) {
    const fill = (select, values) => {
      const chosen = select.value;
      select.replaceChildren(...values.map((value) =>
        el("option", { value: String(value) }, String(value))));
      if (values.map(String).includes(chosen)) {
        select.value = chosen;
      }
    };
    fill(this.slot, facts.slots);
    fill(this.how, facts.completions);
  }

  showHistory(facts) {
    const entries = facts.history.map((entry, number) => {
      const here = number === facts.at;
      return el("li", { class: entry.done ? "" : "rl-undone" },
        el("button", {
          type: "button", "aria-current": here ? "step" : false,
          onclick: () => this.send({ kind: "go", number }),
        }, entry.text), entry.said ? el("small", {}, ` ${entry.said}`) : "");
    });
    this.history.replaceChildren(...entries);
    const here = this.history.children[facts.at];
    this.history.scrollTop = here.offsetTop - 80;
  }

  showPolicy(policy) {
    const set = (name, value) => this.send({ kind: "set", name, value });
    for (const spec of policy.specs) {
      if (!this.controls.has(spec.name)) {
        const control = new ChoiceControl(spec, set, (which) => {
          this.what.textContent = which.what();
        });
        this.controls.set(spec.name, control);
        this.policies.append(control.root, this.what);
      }
      this.controls.get(spec.name).options(spec);
      this.controls.get(spec.name).show(spec.value);
    }
  }

  lost(words) {
    this.message.hidden = false;
    this.message.textContent = words;
  }

  remove() {}
}
