"""Pictures of a plan, a timeline or a simulation's report: text, SVG, HTML, and a trace for Chrome and Perfetto.

Read rows.py first: it turns every source into the charts that the others draw.
"""

from __future__ import annotations

from .gantt import text
from .html_page import html
from .palette import look as look
from .svg import svg
from .trace_file import chrome_trace

__all__ = ["chrome_trace", "html", "svg", "text"]
