// Generates src/generated from the OpenAPI document of the gateway.
import { readFileSync, writeFileSync } from "node:fs";
import openapiTS, { astToString } from "openapi-typescript";

const source = new URL("../../../pkg/api/spool/v1/openapi.json", import.meta.url);
const target = (name) => new URL(`../src/generated/${name}`, import.meta.url);
const header = "// Generated from pkg/api/spool/v1/openapi.json by `npm run generate`; do not edit.\n\n";
const document = JSON.parse(readFileSync(source, "utf8"));
const resolve = (x) => (x.$ref ? x.$ref.slice(2).split("/").reduce((at, key) => at[key], document) : x);

writeFileSync(target("schema.ts"), header + astToString(await openapiTS(document)));

const lines = [];
for (const [path, item] of Object.entries(document.paths)) {
  for (const [method, operation] of Object.entries(item)) {
    if (operation.responses["101"]) continue; // a WebSocket is no call
    const parameters = (operation.parameters ?? []).map(resolve);
    const hasKey = parameters.some((p) => p.name === "Idempotency-Key");
    const results = Object.entries(operation.responses).filter(([status]) => status.startsWith("2"));
    const fields = {
      method: method.toUpperCase(),
      path,
      body: Object.keys(resolve(operation.requestBody ?? {}).content ?? {})[0] ?? "",
      json: results.every(([, response]) => "application/json" in (resolve(response).content ?? {})),
      idempotencyKey: hasKey,
    };
    lines.push(`  ${operation.operationId}: ${JSON.stringify(fields)},`);
  }
}
writeFileSync(
  target("operations.ts"),
  header +
    "/** The method, path, media type of the body (\"\" for none) and form of the result of each operation of the API. */\n" +
    `export const operationTable = {\n${lines.join("\n")}\n} as const;\n`,
);
