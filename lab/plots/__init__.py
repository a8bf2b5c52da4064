"""Pictures of a run: every ``plot_*`` draws the DataFrame that the ``df_*`` beside it returns."""

from lab.plots.arms import df_arms, plot_arms
from lab.plots.series import df_series, plot_series
from lab.plots.splice import df_noops, plot_noops
from lab.plots.two_by_two import df_two_by_two, plot_two_by_two

__all__ = [
    "df_arms",
    "df_noops",
    "df_series",
    "df_two_by_two",
    "plot_arms",
    "plot_noops",
    "plot_series",
    "plot_two_by_two",
]
