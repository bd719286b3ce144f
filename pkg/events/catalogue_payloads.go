package events

// Entry names are in each payload as a whole, since the subject holds only their hash.

// AgentApplied is a version of an agent. The same spec again is the same version; its tags move.
type AgentApplied struct {
	Ref  Reference `json:"ref"` // with the version: the SHA-256 of the spec's canonical JSON
	Tags []string  `json:"tags,omitempty"`
	Spec AgentSpec `json:"spec"`
}

// AgentRemoved hides an agent: new sessions cannot name it, those that pinned a version go on.
type AgentRemoved struct {
	Ref Reference `json:"ref"`
}

// InstanceApplied is a version of an agent instance.
type InstanceApplied struct {
	Ref  Reference    `json:"ref"`
	Tags []string     `json:"tags,omitempty"`
	Spec InstanceSpec `json:"spec"`
}

// InstanceRemoved hides an agent instance.
type InstanceRemoved struct {
	Ref Reference `json:"ref"`
}

// EnvironmentApplied is a version of an environment, without the values of its secrets.
type EnvironmentApplied struct {
	Ref  Reference       `json:"ref"`
	Tags []string        `json:"tags,omitempty"`
	Spec EnvironmentSpec `json:"spec"`
}

// EnvironmentRemoved hides an environment.
type EnvironmentRemoved struct {
	Ref Reference `json:"ref"`
}

// SkillPushed is a version of a skill: a ZIP in bucket skills, under its SHA-256.
type SkillPushed struct {
	Ref           Reference `json:"ref"` // with the version: the SHA-256 of the ZIP
	Tags          []string  `json:"tags,omitempty"`
	Name          string    `json:"name"`          // of the front matter
	Description   string    `json:"description"`   // of the front matter
	Document      string    `json:"document"`      // SKILL.md as it is
	Bytes         uint64    `json:"bytes"`         // of the ZIP
	UnpackedBytes uint64    `json:"unpackedBytes"` // of its files
	Files         uint32    `json:"files"`
}

// SkillTagged moves a tag to a version.
type SkillTagged struct {
	Ref Reference `json:"ref"` // with the version: a SHA-256
	Tag string    `json:"tag"`
}

// SkillRemoved hides a skill, or one version of it; its ZIP stays as long as something refers to it.
type SkillRemoved struct {
	Ref Reference `json:"ref"`
}

// ExecutionResolved says what everything that the execution refers to was at its start.
type ExecutionResolved struct {
	Agent        Reference    `json:"agent,omitzero"` // zero for the built-in one
	Instance     Reference    `json:"instance,omitzero"`
	Environments []Reference  `json:"environments,omitempty"` // in the order of their layers
	Variables    []Provenance `json:"variables,omitempty"`    // by name
	Skills       []SkillUsed  `json:"skills,omitempty"`
	MCPServers   []string     `json:"mcpServers,omitempty"` // by name

	Egress []AllowedHost `json:"egress,omitempty"` // what the sandbox may reach beside models: the session's, then each environment's
}

// AllowedHost is an entry of an execution's allowlist.
type AllowedHost struct {
	Entry string `json:"entry"` // host, host:port or *.host, after methods and a space where not all are allowed
	From  string `json:"from"`  // session, agent or an environment's reference: the first that has it
}

// Provenance says where a variable's value comes from; never a secret's value.
type Provenance struct {
	Name   string `json:"name"`
	From   string `json:"from"` // agent, an environment's reference, or run
	Secret bool   `json:"secret,omitempty"`
	Sealed string `json:"sealed,omitempty"` // of a secret: the key in bucket secrets
	Value  string `json:"value,omitempty"`  // of one that is no secret
}

// SkillUsed is a skill as it was resolved.
type SkillUsed struct {
	Ref      Reference `json:"ref"` // with the SHA-256
	Name     string    `json:"name"`
	Subagent string    `json:"subagent,omitempty"` // whose it is; "" for the agent itself
}
