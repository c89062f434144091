"""The report of a run or a comparison: report.html, its tables as .csv and .tex, summary.json and the figures."""
