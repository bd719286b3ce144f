// Two people look at one session of Claude Code, each by a gateway of their own, one of which stops in the middle of an answer.
import assert from "node:assert/strict";
import { run } from "./browser.mjs";

await run(
  async ({ page: first, context, url }) => {
    const { SPOOL_OTHER: other, SPOOL_SESSION: session } = process.env;
    const second = await context.newPage();
    const pages = [first, second];
    await first.goto(`${url}sessions/${session}`);
    await second.goto(`${other}sessions/${session}`);
    const send = async (page, text) => {
      await page.getByLabel("Message").fill(text);
      await page.keyboard.press("Enter");
    };
    const everywhere = (text) => Promise.all(pages.map((page) => page.getByText(text).first().waitFor()));

    // A denied call: both see the command and the outcome, and the agent reads the comment.
    await send(first, "run touch denied.txt");
    await Promise.all(pages.map((page) => page.locator(".approval-command", { hasText: "touch denied.txt" }).first().waitFor()));
    await second.getByLabel("Comment for the agent").fill("not in this folder");
    await second.getByRole("button", { name: "Reject", exact: true }).click();
    await everywhere("Rejected");
    await everywhere(/The result: .*not in this folder/);

    // A question.
    await send(second, "ask me");
    await first.getByRole("radio", { name: "Blue" }).check();
    await first.getByRole("button", { name: "Answer", exact: true }).click();
    await everywhere(/The answer: .*Blue/);

    // The gateway of the first page stops in the middle of a text; another one takes its place at the same address.
    await send(first, "count");
    await everywhere(/one two three/);
    assert.equal(await first.getByText("the-end").count(), 0, "the text was complete too early for this test");
    const stopped = await context.request.post(`${url}stop-gateway`);
    assert.equal(stopped.status(), 204);
    await everywhere("the-end");
    const answers = await Promise.all(pages.map((page) => page.locator("[data-row]", { hasText: "one two three" }).last().locator(".markdown").innerText()));
    const { blocks } = await (await context.request.get(`${url}api/sessions/${session}/blocks`)).json();
    const content = blocks.findLast((block) => block.kind === "assistant_text").content;
    assert.match(content, /^one two .* the-end$/);
    assert.deepEqual(answers, [content, content], "a page has gaps or doubles");

    // A turn that is cancelled, and one that is interrupted by the next message.
    await send(first, "talk for ever");
    await everywhere("and on and on");
    await second.getByRole("button", { name: "Cancel turn" }).click();
    await everywhere("cancelled");
    await send(first, "talk for ever, again");
    await first.getByRole("radio", { name: "stop this turn first" }).check();
    await send(first, "run echo after > after.txt");
    await second.getByRole("button", { name: "Approve Bash", exact: true }).click();
    await everywhere(/The result:/);

    // A file of the workspace.
    await first.getByRole("tab", { name: "Files" }).click();
    await first.locator(".files-row", { hasText: "after.txt" }).click();
    const [download] = await Promise.all([first.waitForEvent("download"), first.getByRole("link", { name: "Download" }).click()]);
    assert.equal(download.suggestedFilename(), "after.txt");
    const chunks = [];
    for await (const chunk of await download.createReadStream()) chunks.push(chunk);
    assert.equal(Buffer.concat(chunks).toString(), "after\n");

    // Both show the same rows.
    const rows = await Promise.all(pages.map((page) => page.locator("[data-row]").evaluateAll((all) => all.map((row) => row.innerText))));
    assert.deepEqual(rows[0].slice(-10), rows[1].slice(-10));

    // The session is deleted while it is open.
    await second.getByRole("button", { name: "Delete…" }).click();
    await second.getByRole("button", { name: "Delete this session and its files" }).click();
    await first.getByText("This session was deleted, or does not exist.").waitFor();
  },
  { expected: [/ERR_/, /status of 50[234]/, /status of 404/] },
);
