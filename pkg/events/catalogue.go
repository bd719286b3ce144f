package events

import "encoding/json"

// TypeInfo describes one event type: its name, its aspect and its documentation.
type TypeInfo struct {
	Type   Type
	Aspect Aspect // the aspect whose subject carries the event
	Doc    string // one line for docs/events.md
	New    func() Payload
	decode func(json.RawMessage) (Payload, error)
}

// newTypeInfo returns the TypeInfo of the event type with payload type P.
func newTypeInfo[P Payload](aspect Aspect, doc string) TypeInfo {
	var zero P
	return TypeInfo{
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

// EventTypes returns all event types, in the order of docs/events.md.
func EventTypes() []TypeInfo {
	return []TypeInfo{
		newTypeInfo[SessionCreated](Life, "The session was created; the event pins the agent's version and names architecture, provider and options."),
		newTypeInfo[SessionForked](Life, "The session continues from an event of another session; names the snapshots that its files and the agent's records come from."),
		newTypeInfo[SessionOptionsUpdated](Life, "The session's options or metadata changed."),
		newTypeInfo[SessionIdle](Life, "The idle timeout passed; the sandbox is released, and the next message continues the session."),
		newTypeInfo[SessionClosed](Life, "The session accepts no more messages; running executions are cancelled."),
		newTypeInfo[SessionDeleted](Life, "The session was deleted; always its last life event."),
		newTypeInfo[MessageAccepted](Life, "A query was accepted and stored; it is the user_message block of its execution."),
		newTypeInfo[ExecutionQueued](Life, "The execution waits behind others in the session's queue."),
		newTypeInfo[ExecutionDispatched](Life, "An executor may claim the execution; from now on only an event on the run subject ends it."),
		newTypeInfo[ExecutionWithdrawn](Life, "The execution ended before it was dispatched."),
		newTypeInfo[InterruptRequested](Life, "A client requested that the turn stop; the agent's process is kept."),
		newTypeInfo[CancelRequested](Life, "A client or the session service requested that the execution stop; its process is killed after 10 s."),
		newTypeInfo[PauseRequested](Life, "A client requested that the execution pause; its processes keep their memory."),
		newTypeInfo[ResumeRequested](Life, "A client requested that a paused execution resume."),
		newTypeInfo[TerminateRequested](Life, "A client requested that the sandbox be terminated at once, with everything that runs in it."),
		newTypeInfo[SyncRequested](Life, "A client requested a snapshot of the workspace."),
		newTypeInfo[FilePut](Life, "A client put a file or an archive into the workspace; the executor that holds the session applies the change."),
		newTypeInfo[FileRemoved](Life, "A client removed a file from the workspace; the executor that holds the session applies the change."),
		newTypeInfo[ApprovalDecided](Life, "A person decided an approval request."),
		newTypeInfo[ExecutionClaimed](Run, "An executor claimed the execution and holds the session under a new epoch."),
		newTypeInfo[ExecutionResolved](Run, "The agent, environments and skills of the execution, as they were resolved when it started."),
		newTypeInfo[ExecutionAttached](Run, "The executor that took over a running execution follows its agent; the claim does not count as a failed one."),
		newTypeInfo[ExecutionHandedOver](Run, "The executor is shutting down and leaves the execution to the next executor."),
		newTypeInfo[ExecutionStarted](Run, "An attempt started: the agent received the query."),
		newTypeInfo[AttemptFailed](Run, "The agent's process or its sandbox died during the turn; the agent is started again after a wait."),
		newTypeInfo[ExecutionCompleted](Run, "Terminal: the query was answered."),
		newTypeInfo[ExecutionFailed](Run, "Terminal: the query was not answered, with a code and a message."),
		newTypeInfo[ExecutionCancelled](Run, "Terminal: a control stopped the query."),
		newTypeInfo[ExecutionPaused](Run, "The execution is paused; it occupies no slot and no executor holds it until it is resumed."),
		newTypeInfo[ExecutionResumed](Run, "The execution was resumed."),
		newTypeInfo[SandboxCreating](Run, "The creation of a sandbox started."),
		newTypeInfo[SandboxReady](Run, "The runner in the sandbox responds; names its journal."),
		newTypeInfo[SandboxReplaced](Run, "The sandbox was lost and is replaced; states what was lost with it."),
		newTypeInfo[SandboxTerminated](Run, "The sandbox was terminated, with the reason."),
		newTypeInfo[SandboxFailed](Run, "No sandbox could be created."),
		newTypeInfo[SandboxPaused](Run, "The sandbox's processes were paused."),
		newTypeInfo[SandboxResumed](Run, "The sandbox's processes were resumed."),
		newTypeInfo[SandboxHealth](Run, "The sandbox's health changed."),
		newTypeInfo[SandboxUsage](Run, "A metered sandbox ran for a period of time, which may have a price; the periods of a session do not overlap."),
		newTypeInfo[FileCreated](Run, "A file appeared in the workspace."),
		newTypeInfo[FileModified](Run, "A file of the workspace changed."),
		newTypeInfo[FileDeleted](Run, "A file of the workspace was deleted."),
		newTypeInfo[FilesApplied](Run, "The changes of file_put and file_removed were applied to the workspace."),
		newTypeInfo[WorkspaceSyncStarted](Run, "An executor started to apply file changes to a sandbox between turns and to store its workspace."),
		newTypeInfo[WorkspaceSynced](Run, "The workspace and the agent's records were stored in the object store, under the name of a snapshot."),
		newTypeInfo[WorkspaceTrimmed](Run, "Objects of the session's workspace that are no longer referenced were removed."),
		newTypeInfo[WorkspaceRestored](Run, "A new sandbox was filled from a snapshot."),
		newTypeInfo[EgressDenied](Run, "The egress proxy refused a connection or a request of the sandbox."),
		newTypeInfo[ModelCalled](Run, "A request to a model, with tokens, cost and latency as the egress proxy saw them."),
		newTypeInfo[BlockStart](Run, "A block was opened, or is given complete."),
		newTypeInfo[BlockUpdate](Run, "Fields of an open block changed."),
		newTypeInfo[BlockComplete](Run, "The complete, final block."),
		newTypeInfo[SubagentSpawned](Run, "A sub-agent started, with its own conversation id."),
		newTypeInfo[SubagentCompleted](Run, "A sub-agent ended."),
		newTypeInfo[PermissionDecided](Run, "A permission request of the agent was answered by the recorded policy."),
		newTypeInfo[ApprovalRequested](Run, "The agent waits for a person to decide."),
		newTypeInfo[ApprovalResolved](Run, "The agent received the decision on an approval request."),
		newTypeInfo[ApprovalRetracted](Run, "An approval request ended without a decision."),
		newTypeInfo[AgentDenied](Run, "The agent's own program denied a call of a tool, without asking."),
		newTypeInfo[TranscriptWritten](Run, "The agent wrote its own record of the conversation, from which it can be resumed."),
		newTypeInfo[MetadataUpdate](Run, "Usage, cost and model of the execution so far."),
		newTypeInfo[Log](Run, "A line that an agent printed outside its protocol, or a message of the runner."),
		newTypeInfo[RunRetired](Run, "The session is deleted and its run subject accepts no more commits; records its usage by day. Earlier content may be removed."),
		newTypeInfo[ContentRemoved](Run, "The content of a deleted session was removed; only its final events remain."),
		newTypeInfo[Error](Run, "Something failed that does not end the execution by itself; the event that ends the execution states its outcome."),
		newTypeInfo[WatchdogWarned](Run, "The agent sent nothing for too long, or did not exit after its result."),
		newTypeInfo[LoopDetected](Run, "An agent, or a sub-agent, repeats the same tool call with the same result."),
		newTypeInfo[KeyCreated](Key, "An API key was created; only its hash is stored."),
		newTypeInfo[KeyRevoked](Key, "An API key was revoked and is no longer accepted."),
		newTypeInfo[AgentApplied](Agent, "A version of an agent was applied, or its tags moved."),
		newTypeInfo[AgentRemoved](Agent, "The agent was removed: new sessions cannot use it."),
		newTypeInfo[InstanceApplied](Instance, "A version of an agent instance was applied, or its tags moved."),
		newTypeInfo[InstanceRemoved](Instance, "The agent instance was removed."),
		newTypeInfo[EnvironmentApplied](Environment, "A version of an environment was applied, or its tags moved; holds only the names of secrets."),
		newTypeInfo[EnvironmentRemoved](Environment, "The environment was removed."),
		newTypeInfo[SkillPushed](Skill, "A version of a skill was pushed: a ZIP in the object store, named by its SHA-256."),
		newTypeInfo[SkillTagged](Skill, "A tag of the skill was moved to another version."),
		newTypeInfo[SkillRemoved](Skill, "The skill, or one version of it, was removed."),
		newTypeInfo[TenantBudgetSet](TenantBudget, "A tenant's budget for a day, a month or in total was set and replaces the previous one."),
		newTypeInfo[TenantBudgetRemoved](TenantBudget, "The tenant's budget for the period was removed."),
		newTypeInfo[TenantLimitsSet](LimitsAspect, "A tenant's own limits were set and replace the previous ones."),
		newTypeInfo[TenantLimitsRemoved](LimitsAspect, "The tenant's own limits were removed; the settings of the services apply."),
	}
}

// typeInfos holds the TypeInfo of each event type, by name. It is never changed after initialization.
var typeInfos = func() map[Type]TypeInfo {
	m := map[Type]TypeInfo{}
	for _, e := range EventTypes() {
		m[e.Type] = e
	}
	return m
}()

// LookupType returns the TypeInfo of an event type, and whether this build knows the type.
func LookupType(t Type) (TypeInfo, bool) {
	e, ok := typeInfos[t]
	return e, ok
}

// IsTerminal reports whether an event of type t ends an execution.
func IsTerminal(t Type) bool {
	switch t {
	case ExecutionCompleted{}.EventType(), ExecutionFailed{}.EventType(), ExecutionCancelled{}.EventType(), ExecutionWithdrawn{}.EventType():
		return true
	}
	return false
}
