package command

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/spoolhq/spool/pkg/architecture"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/layers"
)

// The placeholders that model settings may contain.
const (
	PlaceholderModel   = "MODEL"
	PlaceholderBaseURL = "MODEL_BASE_URL"
	PlaceholderKey     = "MODEL_KEY"
)

// MaxModelVariables is the largest number of variables in model settings.
const MaxModelVariables = 64

// checkModelSettings returns an error for the first invalid model setting.
func checkModelSettings(s events.ModelSettings) error {
	const at = "sessionOptions.modelSettings."
	if _, ok := architecture.FindPreset(s.Preset); s.Preset != "" && !ok {
		var names []string
		for _, p := range architecture.Presets() {
			names = append(names, p.Name)
		}
		return invalidFieldError(at+"preset", "unknown preset %.64q; must be one of %s", s.Preset, strings.Join(names, ", "))
	}
	if len(s.Env) > MaxModelVariables {
		return invalidFieldError(at+"env", "has %d variables; the limit is %d", len(s.Env), MaxModelVariables)
	}
	for _, name := range slices.Sorted(maps.Keys(s.Env)) {
		field := at + "env." + name
		// Everywhere else only Spool may set these variables. Model settings are the place where users choose their
		// values.
		if !slices.Contains([]string{"ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", "OPENAI_API_KEY", "OPENAI_BASE_URL"}, name) {
			if err := layers.CheckVariableName(name); err != nil {
				return invalidFieldError(field, "%v", err)
			}
		}
		if err := checkTemplate(field, s.Env[name]); err != nil {
			return err
		}
	}
	if len(s.Args) > MaxCommandArguments {
		return invalidFieldError(at+"args", "has %d arguments; the limit is %d", len(s.Args), MaxCommandArguments)
	}
	for i, arg := range s.Args {
		field := fmt.Sprintf("%sargs[%d]", at, i)
		if err := checkTemplate(field, arg); err != nil {
			return err
		}
		if slices.Contains(layers.PlaceholderNames(arg), PlaceholderKey) {
			return invalidFieldError(field, "${%s} is in an argument, which other processes can read: pass the key in a variable", PlaceholderKey)
		}
	}
	return nil
}

// checkTemplate returns an error if the value of a model setting is too long, is not text, or contains an unknown
// placeholder.
func checkTemplate(field, s string) error {
	if len(s) > MaxArgumentLength {
		return invalidFieldError(field, "has %d bytes; the limit is %d", len(s), MaxArgumentLength)
	}
	if strings.ContainsRune(s, 0) || !utf8.ValidString(s) {
		return invalidFieldError(field, "has a NUL byte, or is not valid UTF-8")
	}
	if err := layers.CheckPlaceholders(s); err != nil {
		return invalidFieldError(field, "%v", err)
	}
	for _, name := range layers.PlaceholderNames(s) {
		if name != PlaceholderModel && name != PlaceholderBaseURL && name != PlaceholderKey {
			return invalidFieldError(field, "${%.64s} is not a known placeholder: use ${%s}, ${%s} or ${%s}", name, PlaceholderModel, PlaceholderBaseURL, PlaceholderKey)
		}
	}
	return nil
}

// CheckModelSettings returns an error unless the session's model settings are compatible with its architecture arch,
// its model and its model provider.
func CheckModelSettings(arch string, o events.Options) error {
	s := o.ModelSettings
	if s.Preset == "" && len(s.Env)+len(s.Args) == 0 {
		return nil
	}
	if arch != architecture.ACP {
		return invalidFieldError("sessionOptions.modelSettings", "only architecture acp supports model settings; the architecture is %s", arch)
	}
	if p, ok := architecture.FindPreset(s.Preset); ok && o.ModelProvider != "" && !slices.Contains(p.Providers, o.ModelProvider) {
		return invalidFieldError("sessionOptions.modelProvider", "preset %s does not support model provider %.64s; it supports %s", p.Name, o.ModelProvider, strings.Join(p.Providers, ", "))
	}
	for _, arg := range s.Args {
		if o.Model == "" && slices.Contains(layers.PlaceholderNames(arg), PlaceholderModel) {
			return invalidFieldError("sessionOptions.model", "the arguments of the model settings contain ${%s}, but no model is set", PlaceholderModel)
		}
	}
	return nil
}
