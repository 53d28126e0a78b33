// Bundle the console's scripts and styles into the Python package, with the licences of what is bundled.
//   node build.mjs [FOLDER]     FOLDER: ../qmq/console/static unless it is given
import { readFileSync, writeFileSync, mkdirSync } from "node:fs";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const folder = resolve(process.argv[2] ?? join(here, "..", "qmq", "console", "static"));
mkdirSync(folder, { recursive: true });
await build({
  absWorkingDir: here,
  entryPoints: { app: "src/app.ts", style: "src/style.css" },
  bundle: true,
  minify: true,
  format: "iife",
  target: ["es2022"],
  charset: "utf8",
  legalComments: "none",
  outdir: folder,
});
const licence = readFileSync(join(here, "node_modules", "uplot", "LICENSE"), "utf8");
writeFileSync(join(folder, "LICENSES.txt"), `app.js and style.css contain uPlot:\n\n${licence}`);
