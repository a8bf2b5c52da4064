// Where a view begins and ends: it says that it is there, whether it is in sight, and that it goes.

const PAGES = { panel: PanelPage, stepper: StepperPage };
const HERE_MS = 10000;
// A page in sight asks for a word when it says that it is there, and as soon as frames cease to come;
// if none comes either, it says so.
const CEASED_MS = 3000;
const ANSWER_MS = 6000;
const LOOKS = 3; // a page that was held up itself hears late
const SELDOM = 3;

class Word {
  constructor(ask, told) {
    this.ask = ask;
    this.told = told; // called with the time of the last word once there is none; null: there is
    this.heardAt = this.askedAt = performance.now();
    this.gap = Infinity; // between the last two words
    this.when = new Date();
    this.silent = false;
    this.late = 0;
    this.times = 0;
  }

  // Whatever came from the kernel.
  heard() {
    const now = performance.now();
    this.gap = now - this.heardAt;
    this.heardAt = now;
    this.when = new Date();
    this.late = 0;
    if (this.silent) {
      this.silent = false;
      this.told(null);
    }
  }

  // Something was sent that is answered.
  asked() {
    this.askedAt = performance.now();
  }

  // Each second.
  look() {
    const now = performance.now();
    if (this.silent) {
      return;
    }
    if (this.askedAt <= this.heardAt) {
      if (this.gap < 1000 && now - this.heardAt > CEASED_MS) {
        this.ask();
      }
    } else if (now - this.askedAt > ANSWER_MS && ++this.late >= LOOKS) {
      this.silent = true;
      this.told(this.when);
    }
  }

  // Each HERE_MS; what nobody takes is not heaped up.
  again() {
    this.times += 1;
    if (!this.silent || this.times % SELDOM === 0) {
      this.ask();
    }
  }
}

function render({ model, el: place }) {
  // A page that is loaded again counts from one again: it must not be taken for the one that left.
  const view = `${newId("view")}-${Math.random().toString(36).slice(2)}`;
  const root = document.createElement("div");
  root.className = `ringlab-live rl-page-${model.get("page")}`;
  root.dataset.view = view;
  root.setAttribute("role", "region");
  // Plain keys belong to the controls (arrows move a slider, not the notebook's cells); JupyterLab
  // keeps those with Ctrl, Alt or Meta.
  root.dataset.lmSuppressShortcuts = "true";
  root.addEventListener("keydown", (event) => {
    if (!(event.ctrlKey || event.altKey || event.metaKey)) {
      event.stopPropagation();
    }
  });
  root.setAttribute("aria-label", model.get("page") === "panel" ? "Live panel" : "Stepper");
  place.append(root);
  let inSight = false;
  let gone = false;
  let count = 0;
  const send = (message) => {
    if (gone) {
      return undefined;
    }
    try {
      count += 1;
      model.send({ ...message, view, count, sight: inSight });
    } catch {
      lost();
      return undefined;
    }
    return count;
  };
  const lost = () => {
    gone = true;
    cut("the kernel has gone: run the cell again", true);
  };
  const page = new PAGES[model.get("page")](model, root, send);
  const banner = el("p", { class: "rl-cut", role: "alert" });
  root.prepend(banner);
  // What is shown is no longer so: said in words, and everything that could be pressed is off.
  const cut = (words, final) => {
    banner.textContent = words;
    root.classList.toggle("rl-old", words !== "");
    page.cut(words, final);
  };
  const word = new Word(() => {
    if (inSight) {
      word.asked();
    }
    send({ kind: "here", ask: inSight });
  }, (when) => {
    if (when === null) {
      cut("", false);
      hello(); // what was said meanwhile may be lost
    } else if (!gone) {
      cut(`no word from the kernel since ${when.toLocaleTimeString("en-GB")}: it is busy, has ` +
        "gone, or cannot be reached; what is shown is from then", false);
    }
  });
  const hello = () => {
    word.asked();
    send({
      kind: "hello", setup: !page.isSetUp, bokeh: model.get("page") !== "panel" || bokeh.claimed(),
    });
  };
  const look = (intersecting) => {
    const now = intersecting && !document.hidden;
    if (now !== inSight) {
      inSight = now;
      if (now) {
        hello();
      } else {
        send({ kind: "hidden" });
      }
    }
  };
  let intersecting = false;
  const observer = new IntersectionObserver((entries) => {
    intersecting = entries[entries.length - 1].isIntersecting;
    look(intersecting);
  });
  observer.observe(root);
  const turned = () => look(intersecting);
  const leaving = () => send({ kind: "bye" });
  document.addEventListener("visibilitychange", turned);
  window.addEventListener("pagehide", leaving);
  const here = setInterval(() => word.again(), HERE_MS);
  const looking = setInterval(() => inSight && !gone && word.look(), 1000);

  const received = (message, buffers) => {
    word.heard();
    if (message.kind === "bokeh") {
      bokeh.take(buffers[0]);
    } else if (message.kind === "setup") {
      page.setup(message);
    } else if (message.kind === "rows") {
      page.picture.rows(message, buffers[0]);
    } else if (message.kind === "facts") {
      page.take(message.facts);
    }
  };
  model.on("msg:custom", received);
  model.on("comm_live_update", lost);
  return () => {
    model.off("msg:custom", received);
    model.off("comm_live_update", lost);
    observer.disconnect();
    clearInterval(here);
    clearInterval(looking);
    document.removeEventListener("visibilitychange", turned);
    window.removeEventListener("pagehide", leaving);
    send({ kind: "bye" });
    page.remove();
  };
}

export default { render };
