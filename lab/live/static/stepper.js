// The page of the stepper: buttons, and the state that the kernel has put into words.

class StepperPage {
  constructor(model, root, send) {
    this.root = root;
    this.send = send;
    this.wishes = new Wishes(root, send);
    this.isSetUp = true;
    this.build();
  }

  build() {
    this.phases = el("div", { class: "rl-buttons", role: "group", "aria-label": "The loop" });
    this.events = el("div", {});
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

  // Rows of buttons and fields, as the engine's driver describes them. Made once, as the phases are.
  makeControls(rows) {
    this.fields = new Map();
    const made = (item) => {
      if (item.unit !== undefined) {
        return el("span", { class: "rl-unit" }, item.unit);
      }
      if (item.press !== undefined) {
        return button(item.press, item.help, () => this.send({
          kind: "do", action: item.action, ...Object.fromEntries(Object.entries(item.send)
            .map(([option, field]) => [option, this.fields.get(field).value])),
        }), { "data-action": item.action });
      }
      const name = item.number ?? item.choice;
      const field = item.number !== undefined
        ? el("input", {
          type: "text", class: "rl-number", inputmode: "numeric", value: item.value,
          placeholder: item.empty || undefined, title: item.label, "aria-label": item.label,
        })
        : el("select", { title: item.label, "aria-label": item.label },
          ...item.values.map((value) => el("option", { value }, value)));
      field.dataset.field = name;
      this.fields.set(name, field);
      return field;
    };
    this.events.replaceChildren(...rows.map(({ label, items }) =>
      el("div", { class: "rl-buttons", role: "group", "aria-label": label },
        el("strong", {}, label), ...items.map(made))));
  }

  take(facts) {
    this.facts = facts;
    this.wishes.take(facts);
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
      ...facts.fixtures.map(([name, what]) => made(name, `fixture: ${name}`, what, act(name))),
      made("clear", "clear", "Begin again", act("clear")));
  }

  showPhases(facts) {
    if (this.phases.children.length === 0) {
      this.makePhases(facts);
      this.makeControls(facts.controls);
    }
    const had = document.activeElement;
    const words = new Map(facts.phases);
    for (const made of this.phases.children) {
      const { step } = made.dataset;
      made.classList.toggle("rl-primary", step === facts.next);
      made.disabled = (step === "back" && facts.at === 0) ||
        (step === "forward" && facts.at + 1 >= facts.history.length) ||
        (words.has(step) && step !== facts.next);
      if (words.has(step)) {
        made.textContent = words.get(step);
      }
    }
    // The button that was pressed may be disabled now: the keyboard goes on with the next phase.
    if (had?.disabled && this.phases.contains(had)) {
      this.phases.querySelector(".rl-primary").focus();
    }
  }

  // A selection keeps what is chosen in it for as long as that is offered.
  showChoices(facts) {
    for (const [name, offered] of Object.entries(facts.options)) {
      const select = this.fields.get(name);
      const shown = JSON.stringify(offered);
      if (select.dataset.shown === shown) {
        continue;
      }
      const chosen = select.value;
      select.dataset.shown = shown;
      select.replaceChildren(...offered.map(([value, label]) => el("option", { value }, label)));
      if (offered.some(([value]) => value === chosen)) {
        select.value = chosen;
      }
      select.disabled = offered.length === 0;
      if (select.disabled) {
        select.append(el("option", { value: "" }, "none"));
      }
    }
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
    for (const spec of policy.specs) {
      if (!this.controls.has(spec.name)) {
        const control = new ChoiceControl(spec, this.wishes, (which) => {
          this.what.textContent = which.what();
        });
        this.controls.set(spec.name, control);
        this.policies.append(control.root, this.what);
      }
      this.controls.get(spec.name).options(spec);
      this.controls.get(spec.name).show(spec.value);
    }
  }

  cut(words) {
    for (const made of this.root.querySelectorAll("button, input, select")) {
      if (words) {
        made.dataset.before ??= String(made.disabled);
        made.disabled = true;
      } else if (made.dataset.before !== undefined) {
        made.disabled = made.dataset.before === "true";
        delete made.dataset.before;
      }
    }
  }

  remove() {}
}
