"""Pictures that need neither kernel nor network once they are in a notebook or an HTML page.

BokehJS goes into the document once (:func:`load_bokeh`), as text; each picture then carries only
its own data and a few lines that embed it. The same output serves a notebook that is being run,
one that papermill wrote, one opened later without a kernel, and the HTML made of it.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from uuid import uuid4

from lab import palette
from lab.mode import in_kernel

# A page draws its outputs in any order, and JupyterLab draws those out of sight later, so an
# embedding waits for BokehJS instead of expecting it; when it stays away the reader is told why.
_EMBED = """
(function () {
  const id = %(id)s;
  const item = %(item)s;
  let tries = 0;
  function embed() {
    const place = document.getElementById(id);
    if (place === null) { if (tries++ < 400) { setTimeout(embed, 50); } return; }
    if (place.dataset.drawn) { return; }
    const Bokeh = window.Bokeh;
    if (Bokeh === undefined || Bokeh.embed === undefined) {
      if (tries++ === 100) {
        place.textContent = "This plot waits for BokehJS: run (or scroll to) the cell that " +
          "calls load_bokeh(), near the top of the notebook.";
      }
      setTimeout(embed, tries < 100 ? 50 : 1000);
      return;
    }
    place.dataset.drawn = "yes";
    place.textContent = "";
    Bokeh.embed.embed_item(item, id).catch(function (error) {
      place.textContent = "This plot could not be drawn: " + error;
      console.error(error);
    });
  }
  embed();
})();
"""

# Colours are fixed, on a white card, so that a picture reads the same in JupyterLab's light and
# dark themes, in a browser and on paper.
_STYLE = f"""
<style>
figure.ringlab {{ background: {palette.CARD}; color: {palette.INK}; margin: 4px 0 14px 0;
  padding: 12px 14px 10px 14px; border: 1px solid #d5d5d5; border-radius: 4px; max-width: 1180px;
  box-sizing: border-box; font: 13px/1.45 system-ui, "Helvetica Neue", Arial, sans-serif;
  break-inside: avoid; }}
figure.ringlab > .title {{ font-size: 15px; font-weight: 600; margin: 0 0 4px 0; }}
figure.ringlab > ul {{ list-style: none; margin: 0 0 6px 0 !important; display: flex;
  padding: 0 !important;
  flex-wrap: wrap; gap: 2px 18px; }}
figure.ringlab > ul > li {{ margin: 0 !important; padding: 0; color: {palette.INK}; }}
figure.ringlab > ul svg {{ vertical-align: -2px; margin-right: 5px; }}
figure.ringlab > .caption {{ color: {palette.FAINT_INK}; font-size: 12px; margin: 6px 0 0 0; }}
</style>
"""


@dataclass(frozen=True)
class Key:
    """One entry of a picture's legend; ``shape`` is a key of ``_SHAPES``."""

    label: str
    colour: str
    shape: str = "line"


@dataclass(frozen=True)
class Picture:
    """A Bokeh layout with the words that belong to it.

    Title, legend and caption are HTML around the drawing, not part of it: they wrap in a narrow
    window, can be selected and searched, and are read out by a screen reader. As the last value of
    a cell it shows itself; :func:`show` does the same from anywhere. Without a layout there is
    nothing to draw, and the title says why.
    """

    layout: Any
    title: str
    keys: Sequence[Key] = ()
    caption: str = ""
    height: int = 0

    def to_html(self) -> str:
        """The picture as a piece of HTML for a document that :func:`bokehjs` is in."""
        keys = "".join(f"<li>{_swatch(key)}{html.escape(key.label)}</li>" for key in self.keys)
        place, script = self._drawing() if self.layout is not None else ("", "")
        return (
            f'{_STYLE}<figure class="ringlab" aria-label="{html.escape(self.title)}">'
            f'<p class="title">{html.escape(self.title)}</p>'
            + (f'<ul aria-label="Legend">{keys}</ul>' if keys else "") + place
            + (f'<p class="caption">{html.escape(self.caption)}</p>' if self.caption else "")
            + f"</figure>{script}"
        )

    def _drawing(self) -> tuple[str, str]:
        """The place for the drawing, and the script that fills it."""
        from bokeh.embed import json_item

        target = f"ringlab-{uuid4().hex}"
        script = _EMBED % {
            "id": json.dumps(target),
            "item": _for_script(json_item(self.layout)),
        }
        return (f'<div id="{target}" style="min-height: {self.height}px"></div>',
                f"<script>{script}</script>")

    def to_text(self) -> str:
        """What a place without HTML shows."""
        return f"[plot] {self.title}" + (f" ({self.caption})" if self.caption else "")

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/html": self.to_html(), "text/plain": self.to_text()}


def show(*pictures: Picture) -> None:
    """Put pictures into the notebook, or one line each on a terminal."""
    for picture in pictures:
        if in_kernel():
            _display(picture._repr_mimebundle_())
        else:
            print(picture.to_text())


def load_bokeh() -> None:
    """Put BokehJS into the notebook; once, in a cell above every picture.

    It has a cell of its own, rather than coming with the first picture, so that it stays in the
    saved notebook when a picture's cell is run again.
    """
    if in_kernel():
        _display({"text/html": bokehjs(), "text/plain": "[BokehJS]"})


def _display(bundle: dict[str, str]) -> None:
    from IPython import display

    publish: Callable[[dict[str, str]], None] = display.publish_display_data
    publish(bundle)


@cache
def bokehjs() -> str:
    """BokehJS as a script element, from the installed package (1.2 MB)."""
    from bokeh.resources import Resources

    code = "\n".join(Resources(mode="inline", components=["bokeh"], log_level="error").js_raw)
    return f"<script>{_safe(code)}</script>"


def _for_script(value: object) -> str:
    """JSON that may stand inside a script element, whatever its strings hold."""
    return _safe(json.dumps(value, separators=(",", ":"), allow_nan=False))


def _safe(code: str) -> str:
    """Code that cannot end the script element it stands in; inside strings ``\\/`` is ``/``."""
    return code.replace("</script", "<\\/script").replace("<!--", "<\\!--")


_SHAPES = {
    "line": '<path d="M0 7H18" stroke-width="3"/>',
    "dashed": '<path d="M0 7H18" stroke-width="2" stroke-dasharray="5 3"/>',
    "dotted": '<path d="M0 7H18" stroke-width="2.4" stroke-dasharray="2 3"/>',
    "band": '<rect width="18" height="12" y="1" stroke="none"/>',
    "range": '<path d="M1 7H17M1 3V11M17 3V11" stroke-width="2" fill="none"/>',
    "circle": '<circle cx="9" cy="7" r="5"/>',
    "circle_open": '<circle cx="9" cy="7" r="4" fill="none" stroke-width="2"/>',
    "square": '<rect x="4" y="2" width="10" height="10"/>',
    "triangle": '<path d="M9 1.5L15 12.5H3Z"/>',
    "diamond": '<path d="M9 0.5L14 7L9 13.5L4 7Z" />',
    "x": '<path d="M4 2L14 12M14 2L4 12" stroke-width="2.5"/>',
}


def _swatch(key: Key) -> str:
    body = _SHAPES.get(key.shape, _SHAPES["line"])
    # A light colour keeps a dark edge, or it would be lost on the white card.
    pale = palette.luminance(key.colour) > 0.6 and key.shape != "band"
    edge = palette.INK if pale else key.colour
    return (f'<svg width="18" height="14" viewBox="0 0 18 14" aria-hidden="true" '
            f'fill="{key.colour}" stroke="{edge}">{body}</svg>')
