package command

import (
	"strings"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events/layers"
)

// variableFlags are the flags with variables and secrets of one execution.
type variableFlags struct {
	Var    []string `sep:"none" placeholder:"NAME=VALUE" help:"A variable of this query only; may be repeated."`
	Secret []string `placeholder:"NAME" help:"A secret of this query only, with the value of spool's environment variable of that name; may be repeated."`
}

// readVariables returns the variables and secrets of the query. The values of secrets come from spool's environment and
// never from arguments, because other processes can read arguments.
func (c *variableFlags) readVariables(a *app) (map[string]*spoolv1.RunVariable, error) {
	out := map[string]*spoolv1.RunVariable{}
	put := func(flag, name string, v *spoolv1.RunVariable) error {
		if err := layers.CheckVariableName(name); err != nil {
			return usageError("%s: %v", flag, err)
		}
		if _, twice := out[name]; twice {
			return usageError("%s: %s is set twice", flag, name)
		}
		out[name] = v
		return nil
	}
	for _, s := range c.Var {
		name, value, ok := strings.Cut(s, "=")
		if !ok {
			return nil, usageError("var: %.100q is not NAME=VALUE", s)
		}
		if err := put("var", name, &spoolv1.RunVariable{Value: value}); err != nil {
			return nil, err
		}
	}
	for _, name := range c.Secret {
		value, ok := "", false
		if a.LookupEnv != nil {
			value, ok = a.LookupEnv(name)
		}
		if !ok || value == "" {
			return nil, usageError("secret: environment variable %.100q is not set: export it, and pass only its name", name)
		}
		if err := put("secret", name, &spoolv1.RunVariable{Value: value, Secret: true}); err != nil {
			return nil, err
		}
	}
	if len(out) == 0 {
		return nil, nil
	}
	return out, nil
}
