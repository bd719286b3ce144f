package events

// The payloads contain the complete name of an entry, because the subject contains only its hash.

// AgentApplied records a version of an agent. Applying an identical spec again is the same version and only moves
// its tags.
type AgentApplied struct {
	Ref  Reference `json:"ref"` // with the version: the SHA-256 of the spec's canonical JSON
	Tags []string  `json:"tags,omitempty"`
	Spec AgentSpec `json:"spec"`
}

// AgentRemoved hides an agent: new sessions cannot use it, and sessions that pinned a version continue.
type AgentRemoved struct {
	Ref Reference `json:"ref"`
}

// InstanceApplied records a version of an agent instance.
type InstanceApplied struct {
	Ref  Reference    `json:"ref"`
	Tags []string     `json:"tags,omitempty"`
	Spec InstanceSpec `json:"spec"`
}

// InstanceRemoved hides an agent instance.
type InstanceRemoved struct {
	Ref Reference `json:"ref"`
}

// EnvironmentApplied records a version of an environment, without the values of its secrets.
type EnvironmentApplied struct {
	Ref  Reference       `json:"ref"`
	Tags []string        `json:"tags,omitempty"`
	Spec EnvironmentSpec `json:"spec"`
}

// EnvironmentRemoved hides an environment.
type EnvironmentRemoved struct {
	Ref Reference `json:"ref"`
}

// SkillPushed records a version of a skill: a ZIP in bucket skills, named by its SHA-256.
type SkillPushed struct {
	Ref           Reference `json:"ref"` // with the version: the SHA-256 of the ZIP
	Tags          []string  `json:"tags,omitempty"`
	Name          string    `json:"name"`          // from the front matter
	Description   string    `json:"description"`   // from the front matter
	Document      string    `json:"document"`      // complete text of SKILL.md
	Bytes         uint64    `json:"bytes"`         // size of the ZIP
	UnpackedBytes uint64    `json:"unpackedBytes"` // total size of its files
	Files         uint32    `json:"files"`
}

// SkillTagged moves a tag to a version.
type SkillTagged struct {
	Ref Reference `json:"ref"` // with the version: a SHA-256
	Tag string    `json:"tag"`
}

// SkillRemoved hides a skill, or one version of it. Its ZIP is kept as long as a reference to it exists.
type SkillRemoved struct {
	Ref Reference `json:"ref"`
}

// ExecutionResolved records the versions to which all references of the execution were resolved at its start.
type ExecutionResolved struct {
	Agent        Reference    `json:"agent,omitzero"` // zero for the built-in agent
	Instance     Reference    `json:"instance,omitzero"`
	Environments []Reference  `json:"environments,omitempty"` // in the order of their layers
	Variables    []Provenance `json:"variables,omitempty"`    // by name
	Skills       []SkillUsed  `json:"skills,omitempty"`
	MCPServers   []string     `json:"mcpServers,omitempty"` // by name

	Egress []AllowedHost `json:"egress,omitempty"` // hosts that the sandbox may reach besides the model APIs: the session's entries, then those of each environment
}

// AllowedHost is an entry of the allowlist of an execution.
type AllowedHost struct {
	Entry string `json:"entry"` // host, host:port or *.host; a prefix of HTTP methods and a space restricts the host to these methods
	From  string `json:"from"`  // session, agent or the reference of an environment: the first that contains the entry
}

// Provenance states where the value of a variable comes from. It never contains the value of a secret.
type Provenance struct {
	Name   string `json:"name"`
	From   string `json:"from"` // agent, an environment's reference, or run
	Secret bool   `json:"secret,omitempty"`
	Sealed string `json:"sealed,omitempty"` // secrets only: the key in bucket secrets
	Value  string `json:"value,omitempty"`  // for a variable that is not a secret
}

// SkillUsed is a skill that an execution uses, in the version to which its reference was resolved.
type SkillUsed struct {
	Ref      Reference `json:"ref"` // with the SHA-256
	Name     string    `json:"name"`
	Subagent string    `json:"subagent,omitempty"` // name of the sub-agent that uses the skill; "" for the main agent
}
