package command

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/spoolhq/spool/pkg/architecture"
	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/hostpath"
)

// Limits of a session's options.
const (
	MinIntervalMs           = 1000       // milliseconds: of syncIntervalMs, healthIntervalMs and sandboxMaxAgeMs
	MaxIntervalMs           = 86_400_000 // milliseconds
	MaxImageReferenceLength = 512        // bytes
	MaxEgressEntries        = 256        // entries
	MaxCommandArguments     = 64         // of an agent's command, with its program
	MaxArgumentLength       = 4096       // bytes
)

// codeInvalid is the error code of a request with an invalid field.
const codeInvalid = "INVALID_REQUEST"

// invalidFieldError returns the error of a request whose field is invalid. format and args describe the reason.
func invalidFieldError(field, format string, args ...any) *Error {
	return &Error{Code: codeInvalid, Field: field, Detail: fmt.Sprintf(format, args...)}
}

// FieldHostPath is the request field that names a folder on the server's machine.
const FieldHostPath = "sessionOptions.hostPath"

// CheckFixedOptions returns an error if changes contains an option that is fixed for a session's whole life.
func CheckFixedOptions(changes *events.Options) error {
	if changes != nil && changes.HostPath != "" {
		return invalidFieldError(FieldHostPath, "the folder of a session cannot be changed; create another session")
	}
	return nil
}

// CheckOptions returns an error for the first option that is not valid for any session. Empty options count as not
// set.
func CheckOptions(o events.Options) error {
	for _, f := range []struct {
		name string
		ms   uint32
	}{{"syncIntervalMs", o.SyncIntervalMs}, {"healthIntervalMs", o.HealthIntervalMs}, {"sandboxMaxAgeMs", o.SandboxMaxAgeMs}} {
		if f.ms != 0 && (f.ms < MinIntervalMs || f.ms > MaxIntervalMs) {
			return invalidFieldError("sessionOptions."+f.name, "is %d ms; must be between %d (1 s) and %d (24 h)", f.ms, MinIntervalMs, MaxIntervalMs)
		}
	}
	if o.Image != "" && (len(o.Image) > MaxImageReferenceLength || !imageReference.MatchString(o.Image)) {
		return invalidFieldError("sessionOptions.image", "%.100q is not a reference of an image, such as registry.example.com/agents:2", o.Image)
	}
	if o.ModelProvider != "" && !slices.Contains(architecture.ModelProviders(), o.ModelProvider) {
		return invalidFieldError("sessionOptions.modelProvider", "unknown model provider %.64q; must be one of %s", o.ModelProvider, strings.Join(architecture.ModelProviders(), ", "))
	}
	if o.OnConversationLoss != "" && o.OnConversationLoss != events.OnLossFail && o.OnConversationLoss != events.OnLossContinue {
		return invalidFieldError("sessionOptions.onConversationLoss", "%.64q is unknown; must be %s or %s", o.OnConversationLoss, events.OnLossFail, events.OnLossContinue)
	}
	if o.HostPath != "" {
		if err := hostpath.CheckSyntax(o.HostPath); err != nil {
			return invalidFieldError(FieldHostPath, "%v", err)
		}
	}
	if err := checkCommandArguments(o.Command); err != nil {
		return err
	}
	if err := checkModelSettings(o.ModelSettings); err != nil {
		return err
	}
	if err := CheckBudget("sessionOptions.budget", o.Budget); err != nil {
		return err
	}
	if len(o.Egress) > MaxEgressEntries {
		return invalidFieldError("sessionOptions.egress", "has %d entries; the limit is %d", len(o.Egress), MaxEgressEntries)
	}
	if _, err := egress.ParseAllowlist(o.Egress); err != nil {
		field := "sessionOptions.egress"
		if bad := (*egress.EntryError)(nil); errors.As(err, &bad) {
			field = fmt.Sprintf("%s[%d]", field, bad.Index)
		}
		return invalidFieldError(field, "%v", err)
	}
	return nil
}

// CheckBudget returns an error if the budget's cost is not a valid amount. field is the name of the budget in the
// request.
func CheckBudget(field string, b events.Budget) error {
	if b.CostUSD < 0 || math.IsNaN(b.CostUSD) || math.IsInf(b.CostUSD, 0) {
		return invalidFieldError(field+".costUsd", "must be a number of dollars, 0 or more")
	}
	return nil
}

// CheckTenantLimits returns an error if all limits are empty or one is invalid. field is the name of l in the
// request.
func CheckTenantLimits(field string, l events.TenantLimits) error {
	if l == (events.TenantLimits{}) {
		return invalidFieldError(field, "all fields are empty: set at least one, or remove the limits")
	}
	if l.RequestsPerSecond < 0 || math.IsNaN(l.RequestsPerSecond) || math.IsInf(l.RequestsPerSecond, 0) {
		return invalidFieldError(field+".requestsPerSecond", "must be a number, 0 or more")
	}
	return nil
}

// imageReference matches an image reference: host and port, path, tag, digest.
var imageReference = regexp.MustCompile(`^(?:(?:[A-Za-z0-9]|[A-Za-z0-9][A-Za-z0-9-]*[A-Za-z0-9])(?:\.(?:[A-Za-z0-9]|[A-Za-z0-9][A-Za-z0-9-]*[A-Za-z0-9]))*(?::[0-9]{1,5})?/)?` +
	`[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*(?::\w[\w.-]{0,127})?(?:@sha256:[0-9a-f]{64})?$`)

// checkCommandArguments returns an error unless the program and the arguments of a session's command are valid.
func checkCommandArguments(list []string) error {
	if len(list) > MaxCommandArguments {
		return invalidFieldError("sessionOptions.command", "has %d parts; the limit is %d", len(list), MaxCommandArguments)
	}
	for i, arg := range list {
		field := fmt.Sprintf("sessionOptions.command[%d]", i)
		switch {
		case i == 0 && strings.TrimSpace(arg) == "":
			return invalidFieldError(field, "is empty; the first part must be the agent's program")
		case len(arg) > MaxArgumentLength:
			return invalidFieldError(field, "has %d bytes; the limit is %d", len(arg), MaxArgumentLength)
		case strings.ContainsRune(arg, 0) || !utf8.ValidString(arg):
			return invalidFieldError(field, "has a NUL byte, or is not valid UTF-8")
		}
	}
	return nil
}

// CheckCommand returns an error unless the command is compatible with the architecture arch: acp requires a
// command, and all others refuse one.
func CheckCommand(arch string, list []string) error {
	switch {
	case arch == architecture.ACP && len(list) == 0:
		return invalidFieldError("sessionOptions.command", `architecture acp runs the agent that you name: give its program and arguments, such as ["my-agent","--acp"]`)
	case arch != architecture.ACP && len(list) > 0:
		return invalidFieldError("sessionOptions.command", "only architecture acp supports a command; the architecture is %s", arch)
	}
	return nil
}

// CheckModelProvider returns an error if a provider is named that the architecture arch does not support.
func CheckModelProvider(arch, provider string) error {
	if provider == "" || architecture.CanUse(arch, provider) {
		return nil
	}
	return invalidFieldError("sessionOptions.modelProvider", "architecture %s cannot use model provider %.64q; it can use %s", arch, provider, strings.Join(architecture.ModelProvidersOf(arch), ", "))
}

// resetOption maps the JSON name of each session option that can be reset to the function that resets it.
var resetOption = map[string]func(*events.Options){
	"model":            func(o *events.Options) { o.Model = "" },
	"modelProvider":    func(o *events.Options) { o.ModelProvider = "" },
	"idleTimeoutMs":    func(o *events.Options) { o.IdleTimeoutMs = 0 },
	"turnLimitMs":      func(o *events.Options) { o.TurnLimitMs = 0 },
	"sessionLimitMs":   func(o *events.Options) { o.SessionLimitMs = 0 },
	"syncIntervalMs":   func(o *events.Options) { o.SyncIntervalMs = 0 },
	"healthIntervalMs": func(o *events.Options) { o.HealthIntervalMs = 0 },
	"sandboxMaxAgeMs":  func(o *events.Options) { o.SandboxMaxAgeMs = 0 },
	"image":            func(o *events.Options) { o.Image = "" },
	"command":          func(o *events.Options) { o.Command = nil },
	"modelSettings":    func(o *events.Options) { o.ModelSettings = events.ModelSettings{} },
	"budget":           func(o *events.Options) { o.Budget = events.Budget{} },
	"egress":           func(o *events.Options) { o.Egress = nil },

	"onConversationLoss": func(o *events.Options) { o.OnConversationLoss = "" },
}

// MergeOptions returns a copy of o in which the options named in clear are reset and the options set in changes are
// replaced.
func MergeOptions(o events.Options, changes *events.Options, clear []string) (events.Options, error) {
	for i, name := range clear {
		empty, ok := resetOption[name]
		if !ok {
			return o, invalidFieldError(fmt.Sprintf("clear[%d]", i), "%.64q is not a field of sessionOptions", name)
		}
		empty(&o)
	}
	if changes == nil {
		return o, nil
	}
	// HostPath is neither reset nor changed, see CheckFixedOptions.
	for _, f := range []struct{ to, from *string }{
		{&o.Model, &changes.Model}, {&o.ModelProvider, &changes.ModelProvider}, {&o.Image, &changes.Image}, {&o.OnConversationLoss, &changes.OnConversationLoss},
	} {
		if *f.from != "" {
			*f.to = *f.from
		}
	}
	for _, f := range []struct{ to, from *uint32 }{
		{&o.IdleTimeoutMs, &changes.IdleTimeoutMs}, {&o.TurnLimitMs, &changes.TurnLimitMs}, {&o.SessionLimitMs, &changes.SessionLimitMs},
		{&o.SyncIntervalMs, &changes.SyncIntervalMs}, {&o.HealthIntervalMs, &changes.HealthIntervalMs}, {&o.SandboxMaxAgeMs, &changes.SandboxMaxAgeMs},
	} {
		if *f.from != 0 {
			*f.to = *f.from
		}
	}
	if s := changes.ModelSettings; s.Preset != "" || len(s.Env)+len(s.Args) > 0 {
		o.ModelSettings = s
	}
	if changes.Budget != (events.Budget{}) {
		o.Budget = changes.Budget
	}
	for _, f := range []struct{ to, from *[]string }{{&o.Command, &changes.Command}, {&o.Egress, &changes.Egress}} {
		if len(*f.from) > 0 {
			*f.to = slices.Clone(*f.from)
		}
	}
	return o, nil
}
