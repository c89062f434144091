// Runs the search of a built site: node search.js SITE QUERY prints the pages found, best first, as JSON.
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [site, query] = process.argv.slice(2);
const nothing = new Proxy(() => nothing, { get: () => nothing, set: () => true });
const context = {
  console,
  URLSearchParams,
  SPHINX_HIGHLIGHT_ENABLED: false,
  DOCUMENTATION_OPTIONS: {},
  _: (text) => text,
  _ready: () => undefined,
  location: { search: "" },
  document: {
    body: nothing,
    documentElement: { dataset: { content_root: "./" } },
    getElementById: () => null,
    querySelectorAll: () => [],
    addEventListener: () => undefined,
    readyState: "loading",
  },
};
context.window = context;
vm.createContext(context);
const sources = ["_static/searchtools.js", "_static/language_data.js", "searchindex.js"];
const code = sources.map((name) => fs.readFileSync(path.join(site, name), "utf8")).join("\n");
context.query = query;
const found = vm.runInContext(`${code}\nSearch._performSearch(...Search._parseQuery(query))`, context);
console.log(JSON.stringify([...new Set(found.map(([page]) => page).reverse())])); // Sphinx shows the last first
