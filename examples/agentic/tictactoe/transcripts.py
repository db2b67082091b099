"""One self-contained HTML page that shows episodes token by token: what was sampled, how likely it was, under which version.

`report.py` writes it at the end of a run. Text of tokens is escaped; the page loads nothing and runs no script.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer_bridge import TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A game to show."""

    title: str
    sample: TrainingSample


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Episode transcripts</title><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #0f172a; background: #fff }
h2 { font-size: 1rem; margin: 2rem 0 .3rem } p.note { color: #475569 }
pre { font: 14px/1.7 ui-monospace, monospace; background: #f8fafc; border: 1px solid #e2e8f0; border-radius: 6px; padding: .8rem;
      white-space: pre-wrap }
span.t { color: #64748b } span.s { border-radius: 3px; padding: 1px; color: #0f172a; border-bottom: 3px solid }
span.t:hover, span.s:hover { outline: 2px solid #0f172a } i { font-style: normal; color: #94a3b8 }
</style></head><body><h1>Episode transcripts</h1>
<p class="note">Grey tokens were written by the environment (mask 0, no loss). Coloured ones were sampled by the policy: the deeper
the red, the less likely the token was. The line under a sampled token tells the version of the weights that drew it. Point at a token
for its id, mask, log-probability and version.</p>
<p>Versions: LEGEND</p>
GAMES
</body></html>
"""


def _hue(version: int) -> str:
    return f"hsl({(version * 47) % 360} 70% 45%)"


def _token_span(sample: TrainingSample, place: int, text: str) -> str:
    shown = html.escape(text).replace("\n", "<i>\u23ce</i>\n").replace("\t", "<i>\u21e5</i>") or "<i>\u2205</i>"
    token = int(sample.ids[place])
    if not sample.mask[place]:
        return f'<span class="t" title="place {place} &#10;id {token} &#10;mask 0 (environment)">{shown}</span>'
    logprob, version = float(sample.logprobs[place]), int(sample.versions[place])
    redness = min(1.0, -logprob / 3.0)
    facts = (
        f"place {place} &#10;id {token} &#10;mask 1 (sampled) &#10;logprob {logprob:.4f} (p = {np.exp(logprob):.3f}) &#10;version {version}"
    )
    if sample.behaviour_logprobs is not None:
        facts += f" &#10;behaviour logprob {float(sample.behaviour_logprobs[place]):.4f}"
    style = f"background: hsl(0 90% {96 - 26 * redness:.0f}%); border-color: {_hue(version)}"
    return f'<span class="s" style="{style}" title="{facts}">{shown}</span>'


def write_transcripts(transcripts: Sequence[Transcript], decode: Callable[[int], str], path: Path) -> Path:
    """Write one self-contained page; `decode` gives the text of one token id."""
    versions = sorted({int(version) for entry in transcripts for version in entry.sample.versions[entry.sample.mask]})
    legend = " ".join(f'<span class="s" style="border-color: {_hue(version)}">{version}</span>' for version in versions)
    games = []
    for entry in transcripts:
        spans = "".join(_token_span(entry.sample, place, decode(int(token))) for place, token in enumerate(entry.sample.ids))
        games.append(f"<h2>{html.escape(entry.title)}</h2>\n<pre>{spans}</pre>")
    path.write_text(_PAGE.replace("LEGEND", legend).replace("GAMES", "\n".join(games)), encoding="utf-8")
    return path
