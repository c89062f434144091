"""The figures of a run or a comparison, as PNG, SVG and PDF files."""
