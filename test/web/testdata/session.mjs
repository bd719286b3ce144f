// A finished session of Claude Code: its plan, a failed command, a change of a file, a sub-agent, and Markdown.
import assert from "node:assert/strict";
import { checkAccessibility, run, screenshots } from "./browser.mjs";

await run(async ({ page, url }) => {
  await page.goto(`${url}sessions/${process.env.SPOOL_SESSION}`);
  const row = (type, text) => page.locator(`.row-${type}`, { hasText: text });
  await row("turn", "done").waitFor();

  // The plan as it is now, and the command that failed open by itself; others are one line.
  for (const item of ["Write the function", "Run the tests"]) await page.locator(".plan, .todo, [class*=plan]").getByText(item).first().waitFor();
  await row("tool", "python3 add.py").getByText("AssertionError").first().waitFor();
  assert.equal(await row("tool", "&& echo ok").getByText("ok", { exact: true }).count(), 0, "a command without an error is open");

  // Paths do not have the folder of the workspace. An edit opens to its diff.
  const edit = row("tool", "Edit").getByRole("button", { expanded: false }).first();
  assert.match(await edit.innerText(), /Edit\s+add\.py/);
  await edit.click();
  for (const line of ["return a - b", "return a + b"]) await row("tool", "Edit").getByText(line).first().waitFor();

  // The sub-agent has rows of its own.
  await row("subagent", "Check style").getByRole("button").first().click();
  await row("tool", "wc -l add.py").waitFor();
  await page.locator(".markdown-heading", { hasText: "What was wrong" }).waitFor();
  await checkAccessibility(page);
  await screenshots(page, "conversation");
});
