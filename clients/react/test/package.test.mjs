import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { cpSync, mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

const root = fileURLToPath(new URL("..", import.meta.url));
const tsc = createRequire(import.meta.url).resolve("typescript/bin/tsc");

test("the packages work in an empty project with React 18, with types", (t) => {
  const dir = mkdtempSync(join(tmpdir(), "spool-react-"));
  t.after(() => rmSync(dir, { recursive: true, force: true }));
  const run = (cwd, program, ...args) => {
    const { status, stdout, stderr } = spawnSync(program, args, { cwd, encoding: "utf8" });
    assert.equal(status, 0, stdout + stderr);
    return stdout;
  };
  for (const of of [root, join(root, "../typescript")]) run(of, "npm", "pack", "--silent", "--pack-destination", dir);
  writeFileSync(join(dir, "package.json"), JSON.stringify({ name: "empty", version: "1.0.0", type: "module", private: true }));
  const archives = readdirSync(dir).filter((n) => n.endsWith(".tgz")).map((n) => `./${n}`);
  run(dir, "npm", "install", "--prefer-offline", "--no-fund", "--no-audit", ...archives, "react@18.3.1", "react-dom@18.3.1", "@types/react@18.3.32");
  cpSync(join(root, "test/types.tsx"), join(dir, "types.tsx"));
  const [, example] = /```tsx\n(.*?)```/s.exec(readFileSync(join(root, "README.md"), "utf8"));
  writeFileSync(join(dir, "readme.tsx"), example);
  for (const [module, resolution] of [["NodeNext", "NodeNext"], ["ESNext", "Bundler"]]) {
    run(dir, "node", tsc, "--strict", "--exactOptionalPropertyTypes", "--noEmit", "--jsx", "react-jsx", "--target", "ES2022", "--lib", "ES2022,DOM", "--module", module, "--moduleResolution", resolution, "types.tsx", "readme.tsx");
  }
  writeFileSync(join(dir, "main.mjs"), `
    import { createElement, version } from "react";
    import { renderToString } from "react-dom/server";
    import { AgentServiceProvider, useMessages } from "@spoolhq/react";
    const Chat = () => useMessages("ses_1").connection.status;
    console.log(version.split(".")[0], renderToString(createElement(AgentServiceProvider, { apiUrl: "http://x" }, createElement(Chat))));
  `);
  assert.equal(run(dir, "node", "main.mjs"), "18 connecting\n");
});
