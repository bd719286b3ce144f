import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { visible } from "../src/text";

// The cases of pkg/visible, whose rule this is too.
const cases = JSON.parse(readFileSync("../pkg/visible/testdata/text.json", "utf8")) as Record<string, { in: string; want: string }>;

for (const [name, { in: text, want }] of Object.entries(cases)) {
  test(`visible: ${name}`, () => assert.equal(visible(text), want));
}

test("visible escapes lone surrogates", () => {
  assert.equal(visible("a\ud800b\udfff"), "a\\u{d800}b\\u{dfff}");
});
