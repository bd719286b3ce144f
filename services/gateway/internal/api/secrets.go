package api

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/definition"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/layers"
	"github.com/spoolhq/spool/pkg/secret"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/commands"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// Sealer encrypts and stores the values of secrets.
type Sealer interface {
	// Seal stores the value of a secret of an execution, or of an environment if execution is "", and returns the key
	// under which it is stored.
	Seal(ctx context.Context, tenant, execution string, value []byte) (key string, err error)
}

const (
	maxVariables     = 256       // variables of one execution
	maxVariableBytes = 512 << 10 // total bytes of their values
)

// requireSealer returns a problem for the field if the server has no key with which it can encrypt secrets.
func (s *Server) requireSealer(field string) error {
	if s.Sealer == nil {
		return problem.New(problem.SecretsUnavailable, field, "this server does not accept secrets: it has no public key to encrypt them with; set --secrets-recipient (SPOOL_SECRETS_RECIPIENT)")
	}
	return nil
}

// checkSecretSize returns a problem if a secret's value is too short or too long. Its error does not contain the
// value.
func checkSecretSize(field, value string) error {
	if n := len(value); n < secret.MinValueSize || n > secret.MaxValueSize {
		return problem.Invalid(field, "%s", (&secret.SizeError{Bytes: n}).Error())
	}
	return nil
}

// sealSecret encrypts and stores the value of a secret, and returns the key under which the value is stored. The
// caller must have checked the value.
func (s *Server) sealSecret(ctx context.Context, tenant, execution, field, value string) (string, error) {
	key, err := s.Sealer.Seal(ctx, tenant, execution, []byte(value))
	var size *secret.SizeError
	switch {
	case errors.As(err, &size):
		return "", problem.Invalid(field, "%s", size.Error())
	case err != nil:
		return "", problem.New(problem.Unavailable, "", "the secret could not be stored; nothing was done, try again").WithCause(err)
	}
	return key, nil
}

// variablesRequest is a request that contains environment variables for one execution.
type variablesRequest interface {
	GetEnvironment() map[string]*spoolv1.RunVariable
}

// requestVariables are the environment variables that a request sets for one execution.
type requestVariables struct {
	public  map[string]events.Variable // all variables; secrets without their values
	secrets map[string]string          // values of the secrets, by name
}

// parseVariables validates the environment variables of a request and returns them.
func (s *Server) parseVariables(r variablesRequest) (requestVariables, error) {
	given := r.GetEnvironment()
	out := requestVariables{}
	if len(given) > maxVariables {
		return out, problem.Invalid("environment", "has %d variables; the limit is %d", len(given), maxVariables)
	}
	total := 0
	for _, name := range slices.Sorted(maps.Keys(given)) {
		v, field := given[name], "environment."+truncate.Text(name, 100)
		if err := layers.CheckVariableName(name); err != nil {
			return out, problem.Invalid(field, "%s", err.Error())
		}
		if err := checkVariableValue(field+".value", v.GetValue()); err != nil {
			return out, err
		}
		if total += len(v.GetValue()); total > maxVariableBytes {
			return out, problem.New(problem.PayloadTooLarge, "environment", fmt.Sprintf("the values have more than %d bytes together", maxVariableBytes))
		}
		if out.public == nil {
			out.public, out.secrets = map[string]events.Variable{}, map[string]string{}
		}
		if !v.GetSecret() {
			out.public[name] = events.Variable{Value: v.GetValue()}
			continue
		}
		if err := errors.Join(s.requireSealer(field), checkSecretSize(field+".value", v.GetValue())); err != nil {
			return out, err
		}
		out.public[name], out.secrets[name] = events.Variable{Secret: true}, v.GetValue()
	}
	return out, nil
}

// checkVariableValue returns a problem unless value can be the value of an environment variable. Its error does not
// contain the value.
func checkVariableValue(field, value string) error {
	switch {
	case len(value) > definition.MaxVariableSize:
		return problem.Invalid(field, "value has %d bytes; the limit is %d", len(value), definition.MaxVariableSize)
	case !utf8.ValidString(value), strings.ContainsRune(value, 0):
		return problem.Invalid(field, "value contains a NUL byte or is not valid UTF-8")
	}
	return nil
}

// withSealedBody returns the command request r with the function Seal, which is called when the id of the execution
// is known. Seal encrypts and stores the secrets, and returns the body of the command, which has their keys. body
// must return that body for the given variables.
func (v requestVariables) withSealedBody(s *Server, r commands.Request, body func(map[string]events.Variable) any) commands.Request {
	r.Body = body(v.public)
	if len(v.secrets) == 0 {
		return r
	}
	names := slices.Sorted(maps.Keys(v.secrets))
	for _, name := range names {
		r.Secrets = append(r.Secrets, []byte(name), []byte(v.secrets[name]))
	}
	r.Seal = func(ctx context.Context, tenant, execution string) (any, error) {
		all := maps.Clone(v.public)
		for _, name := range names {
			key, err := s.sealSecret(ctx, tenant, execution, "environment."+name+".value", v.secrets[name])
			if err != nil {
				return nil, err
			}
			all[name] = events.Variable{Secret: true, Sealed: key}
		}
		return body(all), nil
	}
	return r
}

// sealEnvironment replaces the values of an environment's secrets with the keys under which they are stored. A secret
// without a value keeps its value in the latest version; a secret that names a key must have had that key in some
// version.
func (s *Server) sealEnvironment(ctx context.Context, tenant string, ref events.Reference, spec *events.EnvironmentSpec) error {
	if err := checkEnvironmentDraft(*spec); err != nil {
		return err
	}
	kept, err := s.keptSecretKeys(ctx, tenant, ref, *spec)
	if err != nil {
		return err
	}
	names := slices.Sorted(maps.Keys(spec.Variables))
	for _, name := range names {
		if v := spec.Variables[name]; v.Secret && v.Value != "" {
			field := "spec.variables." + name
			if err := errors.Join(s.requireSealer(field), checkSecretSize(field+".value", v.Value)); err != nil {
				return err
			}
		}
	}
	for _, name := range names { // store nothing before all variables were checked
		v := spec.Variables[name]
		switch {
		case !v.Secret:
			continue
		case v.Value == "":
			v.Sealed = kept[name]
		default:
			if v.Sealed, err = s.sealSecret(ctx, ref.OwnerTenant(tenant), "", "spec.variables."+name+".value", v.Value); err != nil {
				return err
			}
		}
		v.Value = ""
		spec.Variables[name] = v
	}
	return nil
}

// checkEnvironmentDraft validates the definition of an environment before its secrets are encrypted. Its error lists
// up to ten violations.
func checkEnvironmentDraft(spec events.EnvironmentSpec) error {
	spec.Variables = maps.Clone(spec.Variables)
	for name, v := range spec.Variables {
		if v.Secret {
			v.Sealed = "" // checked by keptSecretKeys
			spec.Variables[name] = v
		}
	}
	wrong := definition.CheckRequestedEnvironment(spec)
	if len(wrong) == 0 {
		return nil
	}
	detail := wrong[0].Detail
	for _, w := range wrong[1:min(len(wrong), 10)] {
		detail += "; spec." + w.Error()
	}
	return problem.Invalid("spec."+wrong[0].Field, "%s", detail)
}

// keptSecretKeys returns the keys under which the secrets are stored for which the request has no value, by the name
// of the secret. It is the key that the request names, which a version of the environment must have, or else the key
// of the latest version.
func (s *Server) keptSecretKeys(ctx context.Context, tenant string, ref events.Reference, spec events.EnvironmentSpec) (map[string]string, error) {
	kept := map[string]string{}
	var latest *events.EnvironmentSpec
	for _, name := range slices.Sorted(maps.Keys(spec.Variables)) {
		v, field := spec.Variables[name], "spec.variables."+name
		if !v.Secret || v.Value != "" {
			continue
		}
		if v.Sealed != "" {
			known, err := s.Reads.HasSealedSecret(ctx, tenant, ref, name, v.Sealed)
			if err != nil {
				return nil, err
			}
			if !known {
				return nil, problem.Invalid(field+".sealed", "no version of this environment has this key for the variable: give the value, or neither to keep the present one")
			}
			kept[name] = v.Sealed
			continue
		}
		if latest == nil {
			have, err := s.latestEnvironment(ctx, tenant, ref)
			if err != nil {
				return nil, err
			}
			latest = &have
		}
		if kept[name] = latest.Variables[name].Sealed; kept[name] == "" {
			return nil, problem.Invalid(field+".value", "the secret has no value yet: give one")
		}
	}
	return kept, nil
}

// latestEnvironment returns the latest version of an environment, or an empty one if there is none.
func (s *Server) latestEnvironment(ctx context.Context, tenant string, ref events.Reference) (spec events.EnvironmentSpec, err error) {
	v, found, err := s.Reads.Definition(ctx, events.Environment, tenant, ref)
	if err == nil && found {
		err = decodeSpec(v.Spec, &spec)
	}
	return spec, err
}
