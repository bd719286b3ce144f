// Tells the runner what the Agent Client Protocol leaves out of OpenCode's own
// events: why a model failed, that it is asked again, what each answer took, and
// that a turn is long over: `opencode acp` follows its own events over HTTP, and
// when that connection is lost for a moment, it waits for the turn's end for ever.
// A line is written at once, by the same stream as the protocol's own lines.
export const Spool = async () => {
  const tell = (params) =>
    process.stdout.write(JSON.stringify({ jsonrpc: "2.0", method: "_spool/event", params }) + "\n")
  const counted = new Set()
  const over = new Map()
  const patience = 15_000 // ms
  return {
    event: async ({ event }) => {
      const p = event.properties
      switch (event.type) {
        case "session.error": {
          const data = p.error?.data ?? {}
          return tell({ kind: "error", session: p.sessionID, name: p.error?.name, message: data.message, status: data.statusCode })
        }
        case "session.status": {
          clearTimeout(over.get(p.sessionID))
          if (p.status?.type === "idle")
            over.set(p.sessionID, setTimeout(() => tell({ kind: "over", session: p.sessionID }), patience))
          if (p.status?.type !== "retry") return
          const { attempt, message, next } = p.status
          return tell({ kind: "retry", session: p.sessionID, attempt, message, waitMs: Math.round(next - Date.now()) })
        }
        case "message.updated": {
          const i = p.info
          if (i.role !== "assistant" || !i.time?.completed || counted.has(i.id)) return
          counted.add(i.id)
          return tell({ kind: "usage", session: i.sessionID, finish: i.finish, cost: i.cost, tokens: i.tokens })
        }
      }
    },
  }
}
