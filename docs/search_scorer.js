// Scores of search results: a heading with the words of the query comes first, and users' pages come before the
// changelog and the developers' pages.

const INTERNAL = [
  "CHANGELOG",
  "CONTRIBUTING",
  "docs/benchmarks",
  "docs/design",
  "docs/kernels",
  "docs/row_programs",
  "docs/torch_conv1x1_channels_last",
];

var Scorer = {
  score: ([page, , , , score, , kind]) => (score * (kind === "title" ? 3 : 1)) / (INTERNAL.includes(page) ? 100 : 1),
  // Sphinx's own numbers
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
