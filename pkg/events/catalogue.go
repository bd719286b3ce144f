package events

import "encoding/json"

// Entry is one line of the catalogue of types.
type Entry struct {
	Type   Type
	Aspect Aspect // the subject that carries it
	Doc    string // one line for docs/events.md
	New    func() Payload
	decode func(json.RawMessage) (Payload, error)
}

// entry builds a line from the payload's Go type.
func entry[P Payload](aspect Aspect, doc string) Entry {
	var zero P
	return Entry{
		Type:   zero.EventType(),
		Aspect: aspect,
		Doc:    doc,
		New:    func() Payload { var p P; return p },
		decode: func(data json.RawMessage) (Payload, error) {
			var p P
			if len(data) == 0 {
				return p, nil
			}
			err := json.Unmarshal(data, &p)
			return p, err
		},
	}
}

// Catalogue lists every type, in the order of docs/events.md.
func Catalogue() []Entry {
	return []Entry{
		entry[SessionCreated](Life, "A session exists; it pins its agent's version and names architecture, provider and options."),
		entry[SessionForked](Life, "The session goes on from an event of another session; says which snapshots of it the files and the agent's records are from."),
		entry[SessionOptionsUpdated](Life, "The session's options or metadata changed."),
		entry[SessionIdle](Life, "The idle timeout passed; the sandbox is given up, the session goes on with its next message."),
		entry[SessionClosed](Life, "The session takes no more messages; what ran is cancelled."),
		entry[SessionDeleted](Life, "The session is gone; always its last life event."),
		entry[MessageAccepted](Life, "A query was stored; it is the user_message block of its execution."),
		entry[ExecutionQueued](Life, "The query waits behind others."),
		entry[ExecutionDispatched](Life, "An executor may claim the execution; from here only run ends it."),
		entry[ExecutionWithdrawn](Life, "The execution ended before it was dispatched."),
		entry[InterruptRequested](Life, "Someone asked the turn to stop; the agent stays warm."),
		entry[CancelRequested](Life, "Someone asked the execution to stop; after 10 s its process is ended."),
		entry[PauseRequested](Life, "Someone asked that the execution stand still; it keeps all it has in memory."),
		entry[ResumeRequested](Life, "Someone asked that a paused execution go on."),
		entry[TerminateRequested](Life, "Someone asked that the sandbox end at once, with what runs in it."),
		entry[SyncRequested](Life, "Someone asked for a snapshot of the workspace."),
		entry[FilePut](Life, "A file or an archive is to be in the workspace; the session's holder applies it."),
		entry[FileRemoved](Life, "A file is not to be in the workspace any more; the session's holder applies it."),
		entry[ExecutionClaimed](Run, "An executor holds the session's runs under a new epoch."),
		entry[ExecutionResolved](Run, "What the execution's agent, environments and skills were when it began."),
		entry[ExecutionAttached](Run, "The executor that took a running execution over follows its agent; the claim is not one of those that come to nothing."),
		entry[ExecutionHandedOver](Run, "The executor stops and leaves the execution to the next one."),
		entry[ExecutionStarted](Run, "The agent was given the query: one attempt."),
		entry[AttemptFailed](Run, "The agent's process, or its sandbox, died amid the turn; after a wait the agent is started again."),
		entry[ExecutionCompleted](Run, "Terminal: the query was answered."),
		entry[ExecutionFailed](Run, "Terminal: the query was not answered, with a code and a message."),
		entry[ExecutionCancelled](Run, "Terminal: a control stopped the query."),
		entry[ExecutionPaused](Run, "The execution stands still; it has neither slot nor holder until it is resumed."),
		entry[ExecutionResumed](Run, "The execution goes on."),
		entry[SandboxCreating](Run, "A sandbox is being made."),
		entry[SandboxReady](Run, "The runner in the sandbox answers; names its journal."),
		entry[SandboxReplaced](Run, "The sandbox was lost, another takes its place; says what was lost."),
		entry[SandboxTerminated](Run, "The sandbox ended, with the reason."),
		entry[SandboxFailed](Run, "No sandbox could be made."),
		entry[SandboxPaused](Run, "The sandbox's processes stand still."),
		entry[SandboxResumed](Run, "The sandbox's processes go on."),
		entry[SandboxHealth](Run, "The sandbox's health changed."),
		entry[SandboxUsage](Run, "A metered sandbox ran for a time, which may have a price; no time is in two of them."),
		entry[FileCreated](Run, "A file appeared in the workspace."),
		entry[FileModified](Run, "A file of the workspace changed."),
		entry[FileDeleted](Run, "A file is gone from the workspace."),
		entry[FilesApplied](Run, "Changes of file_put and file_removed are in the workspace."),
		entry[WorkspaceSyncStarted](Run, "An executor begins to put file changes into a sandbox at rest, and to store its workspace."),
		entry[WorkspaceSynced](Run, "Workspace and agent's records are in the object store, under a snapshot's name."),
		entry[WorkspaceTrimmed](Run, "Objects of the session's workspace that nothing needs any more were removed."),
		entry[WorkspaceRestored](Run, "A new sandbox was filled from a snapshot."),
		entry[EgressDenied](Run, "The egress proxy refused a connection or a request of the sandbox."),
		entry[ModelCalled](Run, "A request to a model, with tokens, cost and latency as the egress proxy saw them."),
		entry[BlockStart](Run, "A block opens, or is stated whole."),
		entry[BlockUpdate](Run, "Fields of an open block changed."),
		entry[BlockComplete](Run, "The whole block, final."),
		entry[SubagentSpawned](Run, "A sub-agent began, with its own conversation id."),
		entry[SubagentCompleted](Run, "A sub-agent ended."),
		entry[PermissionDecided](Run, "A permission request of the agent was answered by the recorded policy."),
		entry[TranscriptWritten](Run, "The agent's own record of the conversation, by which it can be resumed."),
		entry[MetadataUpdate](Run, "Usage, cost and model of the execution so far."),
		entry[Log](Run, "A line that an agent printed outside its protocol, or a notice of the runner."),
		entry[RunRetired](Run, "The session is deleted and nothing writes to its runs any more: what it took, by day; the content before may be removed."),
		entry[ContentRemoved](Run, "The content of a deleted session was removed; what is left is its ends."),
		entry[Error](Run, "Something went wrong; the execution's end says whether it mattered."),
		entry[WatchdogWarned](Run, "The agent was silent too long, or hung after its result."),
		entry[KeyCreated](Key, "An API key exists; only its hash is stored."),
		entry[KeyRevoked](Key, "An API key is no longer accepted."),
		entry[AgentApplied](Agent, "A version of an agent exists, or its tags moved."),
		entry[AgentRemoved](Agent, "The agent is hidden: new sessions cannot name it."),
		entry[InstanceApplied](Instance, "A version of an agent instance exists, or its tags moved."),
		entry[InstanceRemoved](Instance, "The agent instance is hidden."),
		entry[EnvironmentApplied](Environment, "A version of an environment exists, or its tags moved; of secrets it has the names only."),
		entry[EnvironmentRemoved](Environment, "The environment is hidden."),
		entry[SkillPushed](Skill, "A version of a skill exists: a ZIP in the object store, under its SHA-256."),
		entry[SkillTagged](Skill, "A tag names another version of the skill."),
		entry[SkillRemoved](Skill, "The skill, or one version of it, is hidden."),
		entry[TenantBudgetSet](TenantBudget, "A tenant has a budget for each day, each month, or in total, in place of the former."),
		entry[TenantBudgetRemoved](TenantBudget, "The tenant's budget for the period is no more."),
		entry[TenantLimitsSet](LimitsAspect, "A tenant has limits of its own, in place of the former ones."),
		entry[TenantLimitsRemoved](LimitsAspect, "The tenant has no limits of its own any more: the services' settings count."),
	}
}

// byType is the catalogue by name; it is filled once and never changed.
var byType = func() map[Type]Entry {
	m := map[Type]Entry{}
	for _, e := range Catalogue() {
		m[e.Type] = e
	}
	return m
}()

// Lookup finds a type's line.
func Lookup(t Type) (Entry, bool) {
	e, ok := byType[t]
	return e, ok
}

// Terminal tells whether a type ends an execution.
func Terminal(t Type) bool {
	switch t {
	case ExecutionCompleted{}.EventType(), ExecutionFailed{}.EventType(), ExecutionCancelled{}.EventType(), ExecutionWithdrawn{}.EventType():
		return true
	}
	return false
}
