package events

// Actions of a permission policy.
const (
	PermissionAllow = "allow"
	PermissionAsk   = "ask" // a person decides
	PermissionDeny  = "deny"
)

// Presets of a permission policy. A preset decides the calls that no rule matches.
const (
	PresetWorkspace = "workspace" // allows files in the workspace, commands, sub-agents and the agent's MCP servers; denies the network and everything outside the workspace
	PresetReadOnly  = "read-only" // allows reading files in the workspace; denies everything else
	PresetAsk       = "ask"       // allows reading files in the workspace; asks for everything else
	PresetFull      = "full"      // allows everything
)

// Permissions are the permission policy of an agent. The zero value is the preset workspace without rules.
type Permissions struct {
	Preset     string            `json:"preset,omitempty"`     // workspace (the default), read-only, ask or full
	Rules      []PermissionRule  `json:"rules,omitempty"`      // the first rule that matches a call decides
	Tools      map[string]string `json:"tools,omitempty"`      // allow, ask or deny by the name of a tool; applies to calls that no rule matches
	Default    string            `json:"default,omitempty"`    // allow, ask or deny for all other calls; "" means that the preset decides
	Unattended string            `json:"unattended,omitempty"` // deny (the default) or skip: how a call that a person would decide is answered in an execution without one
	TimeoutMs  uint32            `json:"timeoutMs,omitempty"`  // milliseconds after which a request that nobody has decided is denied; 0 means never
}

// PermissionRule decides the calls that it matches. A call must meet all conditions that are set.
type PermissionRule struct {
	Tool    string   `json:"tool,omitempty"`    // glob on the name of the tool, as the agent uses it; "" means every tool
	Command []string `json:"command,omitempty"` // the command begins with the words of one of these
	Path    []string `json:"path,omitempty"`    // globs on the paths that the call names, relative to the workspace or absolute
	Host    []string `json:"host,omitempty"`    // hosts that the call reaches: host or *.host
	Then    string   `json:"then"`              // allow, ask or deny
}

// ExecutionPermissions adapt an agent's permission policy to one execution.
type ExecutionPermissions struct {
	Rules      []PermissionRule `json:"rules,omitempty"`      // come before the agent's rules
	Unattended bool             `json:"unattended,omitempty"` // no person is there to decide; see Permissions.Unattended
}

// Values of Permissions.Unattended.
const (
	UnattendedDeny = "deny"
	UnattendedSkip = "skip"
)
