// Where a view begins and ends: it says that it is there, whether it is in sight, and that it goes.

const PAGES = { panel: PanelPage, stepper: StepperPage };
const HERE_MS = 10000;

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
      return;
    }
    try {
      count += 1;
      model.send({ ...message, view, count, sight: inSight });
    } catch {
      lost();
    }
  };
  const lost = () => {
    gone = true;
    page.lost("the kernel has gone: run the cell again");
  };
  const page = new PAGES[model.get("page")](model, root, send);
  const hello = () => send({
    kind: "hello", setup: !page.isSetUp, bokeh: model.get("page") !== "panel" || bokeh.claimed(),
  });
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
  const here = setInterval(() => send({ kind: "here" }), HERE_MS);

  const received = (message, buffers) => {
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
    document.removeEventListener("visibilitychange", turned);
    window.removeEventListener("pagehide", leaving);
    send({ kind: "bye" });
    page.remove();
  };
}

export default { render };
