"""The report of a run or a comparison: tables, report.md, report.html, summary.json and the figures."""
