import { readdirSync } from "node:fs";
import { defineConfig } from "vite";

const tests = readdirSync(import.meta.dirname).filter((name) => /\.test\.tsx?$/.test(name));

/** Compiles the tests with the page's own compiler, each to a file of node:test. */
export default defineConfig({
  build: {
    ssr: true,
    outDir: "node_modules/.test",
    emptyOutDir: true,
    target: "node20",
    rolldownOptions: { input: tests.map((name) => `${import.meta.dirname}/${name}`), output: { entryFileNames: "[name].mjs" } },
  },
  logLevel: "warn",
});
