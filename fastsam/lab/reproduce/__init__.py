"""The papers' tables and figures as config files, run at the paper's scale or a small one, with published numbers."""
