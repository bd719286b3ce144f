import assert from "node:assert/strict";
import { test } from "node:test";
import { flattenTree } from "../src/tree";

const file = (path: string, size = 1) => ({ path, kind: "file" as const, size });
const shown = (...args: Parameters<typeof flattenTree>) => flattenTree(...args).map((r) => `${"  ".repeat(r.depth)}${r.name}${r.isFolder ? "/" : ""}`);

test("folders come before files, and closed folders hide what is in them", () => {
  const files = [file("b.txt"), file("src/z.go"), file("a.txt"), { path: "empty", kind: "dir" as const, size: 0 }, file("src/inner/x.go")];
  assert.deepEqual(shown(files, new Set()), ["empty/", "src/", "a.txt", "b.txt"]);
  assert.deepEqual(shown(files, new Set(["src"])), ["empty/", "src/", "  inner/", "  z.go", "a.txt", "b.txt"]);
  assert.deepEqual(shown(files, new Set(["src/inner"])), ["empty/", "src/", "a.txt", "b.txt"], "an open folder in a closed one is hidden");
});

test("a path with thousands of folders is flattened", () => {
  const names = Array.from({ length: 5000 }, () => "d");
  const opened = new Set(names.map((_, i) => names.slice(0, i + 1).join("/")));
  assert.equal(flattenTree([file([...names, "f"].join("/"))], opened).length, 5001);
});

test("names like those of an object's properties are names", () => {
  assert.deepEqual(shown([file("__proto__/constructor")], new Set(["__proto__"])), ["__proto__/", "  constructor"]);
});

test("300,000 files in one folder are flattened", () => {
  assert.equal(flattenTree(Array.from({ length: 300_000 }, (_, i) => file(`f${i}`)), new Set()).length, 300_000);
});
