import assert from "node:assert/strict";
import { test } from "node:test";
import { SpoolClient } from "@spoolhq/client";
import { createElement } from "react";
import { renderToString } from "react-dom/server";
import * as spool from "../dist/index.js";

test("all hooks render on a server, without a request", () => {
  const client = new SpoolClient({ baseUrl: "http://x", fetch: () => assert.fail("a request was sent") });
  const Page = ({ id }) => {
    const { blocks, isLoading, connection } = spool.useMessages(id);
    const { sessions } = spool.useSessionList();
    const approvals = [spool.useApprovals(id), spool.useApprovals()];
    spool.useAgentSession(id);
    spool.useSubagents(id);
    spool.useWorkspaceFiles(id);
    spool.useEvents(id);
    spool.useLogs(id);
    spool.useExecution(id);
    spool.usePlan(id);
    spool.useUsage(id);
    spool.useReplay(id);
    return JSON.stringify([blocks, isLoading, connection.status, sessions, approvals.map((a) => a.count)]).replaceAll('"', "'");
  };
  const render = (id) => renderToString(createElement(spool.AgentServiceProvider, { client }, createElement(Page, { id }))).replaceAll("&#x27;", "'");
  assert.equal(render("ses_1"), "[[],true,'connecting',[],[0,0]]");
  assert.equal(render(undefined), "[[],false,'connecting',[],[0,0]]");
});

test("a provider makes a client of its settings", () => {
  let client;
  const Probe = () => ((client = spool.useClient()), null);
  renderToString(createElement(spool.AgentServiceProvider, { apiUrl: "http://x", apiKey: "key" }, createElement(Probe)));
  assert.ok(client instanceof SpoolClient);
  assert.throws(() => renderToString(createElement(Probe)), /AgentServiceProvider/);
});

test("guards report the kind of a block", () => {
  const guards = Object.entries(spool).filter(([name]) => /^is\w+Block$/.test(name));
  assert.equal(guards.length, 12);
  for (const [name, guard] of guards) {
    const kind = name.slice(2, -"Block".length).replace(/(?!^)[A-Z]/g, "_$&").toLowerCase();
    assert.deepEqual([guard({ kind }), guard({ kind: "other" })], [true, false]);
  }
});
