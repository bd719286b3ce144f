// Tells the runner what the Agent Client Protocol leaves out of OpenCode's own
// events: why a model failed, that it is asked again, what each answer took, and
// that a turn is long over: `opencode acp` follows its own events over HTTP, and
// when that connection is lost for a moment, it waits for the turn's end for ever.
// A line is written at once, by the same stream as the protocol's own lines.
//
// It tells what sub-agents do, as the protocol's updates: `opencode acp` passes on nothing of them.
//
// It also tells the beginning of a turn's text, before `opencode acp` does: that asks
// for the whole message over HTTP before it sends the first piece of a text. The text
// ends with the first tool, because calls are told by `opencode acp` alone, later.
//
// With SPOOL_AGENT_FORK it makes a copy of a session first, up to and including the
// message `anchor`, and tells its id: the protocol's own session/fork copies all.
//
// `opencode acp` passes on no permission request of a sub-agent. With SPOOL_AGENT_ASKS this plugin tells them
// (`_spool/event` of kind `permission`), and takes the answers from stdin (`_spool/answer`).
export const Spool = async ({ client }) => {
  const tell = (params) =>
    process.stdout.write(JSON.stringify({ jsonrpc: "2.0", method: "_spool/event", params }) + "\n")
  const data = ({ data, error }) => {
    if (error) throw new Error(error.data?.message ?? error.name ?? "OpenCode refused the request")
    return data
  }
  const copy = async ({ session, anchor }) => {
    const path = { id: session }
    const list = data(await client.session.messages({ path }))
    const at = anchor ? list.findIndex((m) => m.info.id === anchor) : list.length - 1
    if (at < 0) throw new Error(anchor ? `it has no message ${anchor}` : "it has no messages")
    const next = list[at + 1]?.info.id // is not copied, nor is what follows it
    return data(await client.session.fork({ path, body: next ? { messageID: next } : {} })).id
  }
  const fork = process.env.SPOOL_AGENT_FORK
  if (fork) {
    delete process.env.SPOOL_AGENT_FORK // the plugin may be loaded more than once
    const late = new Promise((_, no) => setTimeout(() => no(new Error("OpenCode made no copy of it in time")), 60_000))
    // Not before the plugin is there: until then OpenCode answers no request.
    setTimeout(() =>
      Promise.race([copy(JSON.parse(fork)), late]).then(
        (session) => tell({ kind: "forked", session }),
        (e) => tell({ kind: "forked", message: e.message }),
      ),
    )
  }
  const counted = new Set()
  const began = Date.now() // answers from before were counted, and their copies in a fork took nothing
  const over = new Map()
  const patience = 15_000 // ms
  const early = 32 // pieces of text in a turn; by then `opencode acp` has caught up
  const turns = new Map() // by session: the types of its texts by part, and how many pieces are left
  const turn = (session) => {
    if (!turns.has(session)) turns.set(session, { left: early, types: new Map() })
    return turns.get(session)
  }
  const asked = new Set() // permission requests of sub-agents that wait
  const calls = new Map() // arguments of their calls that have not ended, by session and call: sub-agents may use the same ids
  const key = (session, call) => JSON.stringify([session, call])
  const parents = new Map() // by session of a sub-agent: the session and the call that run it; the call is "" until it is known
  const roles = new Map() // by message of a sub-agent
  const said = new Map() // by part of a sub-agent's message: how much of its text was told
  const asks = process.env.SPOOL_AGENT_ASKS === "1"
  let listening = false
  const listen = () => {
    // Not before the first request: whoever listens first gets all that has arrived, and `opencode acp` needs that.
    if (listening) return
    listening = true
    const decoder = new TextDecoder()
    let rest = ""
    process.stdin.on("data", (chunk) => {
      const lines = (rest + decoder.decode(chunk, { stream: true })).split("\n")
      rest = lines.pop()
      for (const line of lines) {
        if (!line.includes('"_spool/answer"')) continue
        const { id, reply, message } = JSON.parse(line).params
        if (!asked.delete(id)) continue
        client._client.post({ url: "/permission/{requestID}/reply", path: { requestID: id }, body: { reply, message }, headers: { "Content-Type": "application/json" } })
      }
    })
  }
  const update = (session, update) => tell({ kind: "update", session, parent: parents.get(session) ?? { session, call: update.toolCallId }, update })
  const text = (session, part, piece) => {
    if (!piece) return
    said.set(part.id, (said.get(part.id) ?? 0) + piece.length)
    const thought = part.type === "reasoning"
    const kind = thought ? "agent_thought_chunk" : roles.get(part.messageID) === "user" ? "user_message_chunk" : "agent_message_chunk"
    update(session, { sessionUpdate: kind, messageId: thought ? part.id : part.messageID, content: { type: "text", text: piece } })
  }
  const tool = (session, { callID, tool, state }) => {
    const result = (text) => [{ type: "content", content: { type: "text", text } }]
    const call = { sessionUpdate: "tool_call_update", toolCallId: callID, title: tool, rawInput: state.input }
    if (state.input?.filePath) call.locations = [{ path: state.input.filePath }]
    switch (state.status) {
      case "pending":
        return update(session, { ...call, sessionUpdate: "tool_call", status: "pending" })
      case "running":
        const shown = tool === "bash" && state.metadata?.output
        return update(session, { ...call, status: "in_progress", ...(shown ? { content: result(shown) } : {}) })
      case "completed":
        const { output, metadata, title } = state
        const read = tool === "read" && metadata?.display
        const content = result((read?.type === "file" && read.text) || read?.entries?.join("\n") || output)
        const { filePath, oldString, newString } = state.input
        if (oldString !== undefined) content.push({ type: "diff", path: filePath, oldText: oldString, newText: newString })
        return update(session, { ...call, title: title || tool, status: "completed", content, rawOutput: { output, metadata } })
      case "error":
        return update(session, { ...call, status: "failed", content: result(state.error), rawOutput: { error: state.error, metadata: state.metadata } })
    }
  }
  const follow = (part) => {
    const { id, sessionID, type, callID, state } = part
    const task = type === "tool" && part.tool === "task"
    if (task && state.metadata?.sessionId) parents.set(state.metadata.sessionId, { session: sessionID, call: callID })
    if (type === "tool" && (task || parents.has(sessionID))) tool(sessionID, part)
    if (parents.has(sessionID) && ((type === "text" && !part.ignored) || type === "reasoning")) {
      text(sessionID, part, part.text.slice(said.get(id) ?? 0))
    }
    if (!asks || type !== "tool") return
    if (state.status === "completed" || state.status === "error") calls.delete(key(sessionID, callID))
    else calls.set(key(sessionID, callID), { tool: part.tool, input: state.input })
  }
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
          if (p.status?.type === "idle") {
            turns.delete(p.sessionID)
            if (!parents.has(p.sessionID)) for (const told of [said, roles]) told.clear()
            over.set(p.sessionID, setTimeout(() => tell({ kind: "over", session: p.sessionID }), patience))
          }
          if (p.status?.type !== "retry") return
          const { attempt, message, next } = p.status
          return tell({ kind: "retry", session: p.sessionID, attempt, message, waitMs: Math.round(next - Date.now()) })
        }
        case "message.part.updated": {
          const { id, sessionID, type, ignored } = p.part
          follow(p.part)
          if (type === "tool") turn(sessionID).left = 0
          else if ((type === "text" && !ignored) || type === "reasoning") turn(sessionID).types.set(id, type)
          return
        }
        case "session.created":
        case "session.updated":
          if (p.info?.parentID && !parents.has(p.info.id)) parents.set(p.info.id, { session: p.info.parentID, call: "" })
          return
        case "permission.asked": {
          const parent = parents.get(p.sessionID)
          if (!asks || !parent || asked.has(p.id)) return
          asked.add(p.id)
          listen()
          const { tool = p.permission, input = p.metadata } = calls.get(key(p.sessionID, p.tool?.callID)) ?? {}
          return tell({ kind: "permission", session: p.sessionID, id: p.id, parent, call: p.tool?.callID, tool, input, metadata: p.metadata })
        }
        case "permission.replied": {
          if (asked.delete(p.requestID)) return tell({ kind: "replied", session: p.sessionID, id: p.requestID, parent: parents.get(p.sessionID) })
          return
        }
        case "message.part.delta": {
          if (parents.has(p.sessionID)) {
            const type = turn(p.sessionID).types.get(p.partID)
            if (p.field === "text" && type) text(p.sessionID, { id: p.partID, messageID: p.messageID, type }, p.delta)
            return
          }
          const t = turn(p.sessionID)
          if (p.field !== "text" || t.left === 0) return
          const type = t.types.get(p.partID)
          if (!type) return void (t.left = 0) // no piece may be told after one that was not
          t.left--
          const thought = type === "reasoning"
          return tell({ kind: "text", session: p.sessionID, id: thought ? p.partID : p.messageID, thought, text: p.delta })
        }
        case "message.updated": {
          const i = p.info
          if (parents.has(i.sessionID)) roles.set(i.id, i.role)
          if (i.role !== "assistant" || !i.time?.completed || i.time.completed < began || counted.has(i.id)) return
          counted.add(i.id)
          return tell({ kind: "usage", session: i.sessionID, finish: i.finish, cost: i.cost, tokens: i.tokens })
        }
      }
    },
  }
}
