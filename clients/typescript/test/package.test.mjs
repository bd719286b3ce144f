import assert from "node:assert/strict";
import { execFileSync, spawnSync } from "node:child_process";
import { cpSync, mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

const root = fileURLToPath(new URL("..", import.meta.url));

test("the package works in an empty project, with types and without other packages", (t) => {
  const dir = mkdtempSync(join(tmpdir(), "spool-client-"));
  t.after(() => rmSync(dir, { recursive: true, force: true }));
  const run = (program, ...args) => {
    const { status, stdout, stderr } = spawnSync(program, args, { cwd: dir, encoding: "utf8" });
    assert.equal(status, 0, stdout + stderr);
    return stdout;
  };
  execFileSync("npm", ["pack", "--silent", "--pack-destination", dir], { cwd: root });
  const [archive] = readdirSync(dir);
  writeFileSync(join(dir, "package.json"), JSON.stringify({ name: "empty", version: "1.0.0", type: "module", private: true }));
  run("npm", "install", "--offline", "--no-fund", "--no-audit", `./${archive}`);
  assert.deepEqual(readdirSync(join(dir, "node_modules")).filter((n) => !n.startsWith(".")), ["@spoolhq"]);
  cpSync(join(root, "test/types.ts"), join(dir, "types.ts"));
  const source = readFileSync(join(dir, "types.ts"), "utf8").replace("../src/index.js", "@spoolhq/client");
  writeFileSync(join(dir, "types.ts"), source);
  const tsc = createRequire(import.meta.url).resolve("typescript/bin/tsc");
  for (const [module, resolution] of [["NodeNext", "NodeNext"], ["ESNext", "Bundler"]]) {
    run("node", tsc, "--strict", "--exactOptionalPropertyTypes", "--noEmit", "--target", "ES2022", "--lib", "ES2022,DOM", "--module", module, "--moduleResolution", resolution, "types.ts");
  }
  writeFileSync(join(dir, "main.mjs"), 'import { SpoolClient, foldBlocks } from "@spoolhq/client";\nconsole.log(new SpoolClient({ baseUrl: "http://x" }).session("ses_1").id, foldBlocks([]).length);\n');
  assert.equal(run("node", "main.mjs"), "ses_1 0\n");
});
