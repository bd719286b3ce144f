import assert from "node:assert/strict";
import { test } from "node:test";
import { readSeq } from "../src/location";

test("readSeq accepts positions of events only", () => {
  assert.equal(readSeq(new URLSearchParams("seq=12")), 12);
  for (const value of ["", "0", "-5", "1.5", "1e400", "0x10", "NaN", "99999999999999999999", " 7", "<img>"]) assert.equal(readSeq(new URLSearchParams({ seq: value })), undefined, value);
  assert.equal(readSeq(new URLSearchParams()), undefined);
});
