package worker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/layers"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/secret"
	"github.com/spoolhq/spool/pkg/skill"
)

// Skills brings skills to the engine.
type Skills interface {
	// Provide makes sure that a skill lies where sandboxes see it, and gives the
	// folder; ErrNoSkill if the object store does not have it.
	Provide(ctx context.Context, digest string) (dir string, err error)
}

// stocker is a provider whose sandboxes have no folder of skills in common.
type stocker interface {
	// Stock brings skills, which Skills has provided, into a sandbox. sandbox.ErrNotFound when it is gone.
	Stock(ctx context.Context, id string, digests []string) error
}

// ErrNoSkill is a skill whose ZIP is gone.
var ErrNoSkill = errors.New("the skill's archive is not in the object store")

// Secrets opens what gateways sealed; what secret.ErrUnavailable keeps from it is asked for again. The values of an execution are removed by
// the session service, once the log holds its end.
type Secrets interface {
	Open(ctx context.Context, tenant, key string) (string, error)
}

// unresolved is a reference or a variable that keeps an execution from beginning.
type unresolved struct {
	code string
	err  error
}

func (e *unresolved) Error() string { return e.err.Error() }
func (e *unresolved) Unwrap() error { return e.err }

// ended is the end of an execution by it.
func (e *unresolved) ended() events.ExecutionFailed {
	return events.ExecutionFailed{Code: e.code, Message: strings.ReplaceAll(e.Error(), "\n", "; ")}
}

// resolution is all that an execution refers to.
type resolution struct {
	events.ExecutionResolved
	agent   events.AgentSpec  // zero for the built-in one
	skills  []runner.Skill    // Dir is "" for one whose archive is missing
	texts   []string          // the SKILL.md of each
	values  map[string]string // of the variables, secrets opened
	secrets []string          // values that nothing may show
	gone    []string          // digests of skills that were removed
	sockets []string          // of the MCP servers in containers, in their order; once these run

	selective bool // some entry of Egress has methods
}

// resolve finds what the execution refers to: as it was when the execution
// began, once that is in the log. An *unresolved error keeps it from beginning.
func (t *turn) resolve(ctx context.Context) error {
	r := &resolution{values: map[string]string{}}
	err := t.references(ctx, r)
	if err == nil {
		err = t.open(ctx, r)
	}
	if err == nil {
		err = t.mayServe(r)
	}
	if err == nil {
		err = r.complete()
	}
	if err == nil {
		err = r.look()
	}
	if err != nil {
		return err
	}
	t.resolution = r
	if t.l.Run.Resolved.Known || r.nothing() {
		return nil
	}
	return t.say(ctx, r.ExecutionResolved)
}

// nothing tells whether the execution refers to nothing, has no variables, and may reach nothing.
func (r *resolution) nothing() bool {
	return r.Agent.Slug == "" && len(r.Environments) == 0 && len(r.Variables) == 0 && len(r.Egress) == 0
}

// references fills in what the references of agent, instance, environments and skills mean.
func (t *turn) references(ctx context.Context, r *resolution) error {
	life, known := t.l.Life, t.l.Run.Resolved.Known
	r.Agent, r.Instance = life.AgentRef, life.Instance
	if known {
		before, err := t.recorded(ctx)
		if err != nil {
			return err
		}
		r.ExecutionResolved = before
	}
	if r.Agent.Slug != "" {
		applied, err := lookUp[events.AgentApplied](ctx, t, events.Agent, r.Agent)
		if err != nil {
			return err
		}
		r.agent = applied.Spec
	}
	if !known {
		if err := t.layers(ctx, r); err != nil {
			return err
		}
		for _, ref := range r.agent.Skills {
			r.Skills = append(r.Skills, events.SkillUsed{Ref: ref})
		}
		for _, sub := range r.agent.Subagents {
			for _, ref := range sub.Skills {
				r.Skills = append(r.Skills, events.SkillUsed{Ref: ref, Subagent: sub.Name})
			}
		}
		for _, m := range r.agent.MCPServers {
			r.MCPServers = append(r.MCPServers, m.Name)
		}
	}
	for i := range r.Skills {
		pushed, err := t.skill(ctx, r, r.Skills[i].Ref)
		if err != nil {
			return err
		}
		r.Skills[i].Ref, r.Skills[i].Name = pushed.Ref, pushed.Name
		of := runner.Skill{Name: pushed.Name, Description: pushed.Description, Unlisted: r.Skills[i].Subagent != ""}
		r.skills, r.texts = append(r.skills, of), append(r.texts, pushed.Document)
	}
	return nil
}

// skill finds what a reference to a skill means. Of a version that was removed
// since somebody wrote its digest down, SKILL.md is still known.
func (t *turn) skill(ctx context.Context, r *resolution, ref events.Reference) (events.SkillPushed, error) {
	pushed, err := lookUp[events.SkillPushed](ctx, t, events.Skill, ref)
	var wrong *unresolved
	if !errors.As(err, &wrong) || !events.IsDigest(ref.Version) {
		return pushed, err
	}
	p, rerr := eventlog.Entries{Log: t.w.d.Sessions.Log}.Recall(ctx, events.Skill, t.l.Tenant, ref)
	var none *eventlog.VersionError
	if errors.As(rerr, &none) {
		return pushed, err
	}
	if rerr != nil {
		return pushed, rerr
	}
	pushed, ok := p.(events.SkillPushed)
	if !ok {
		return pushed, fmt.Errorf("skill %s is a %T", ref, p)
	}
	r.gone = append(r.gone, pushed.Ref.Version)
	return pushed, nil
}

// layers merges the variables.
func (t *turn) layers(ctx context.Context, r *resolution) error {
	refs := t.l.Life.Environments
	if r.Instance.Slug != "" {
		applied, err := lookUp[events.InstanceApplied](ctx, t, events.Instance, r.Instance)
		if err != nil {
			return err
		}
		refs = slices.Concat(applied.Spec.Environments, refs)
	}
	var list []layers.Environment
	for _, ref := range refs {
		applied, err := lookUp[events.EnvironmentApplied](ctx, t, events.Environment, ref)
		if err != nil {
			return err
		}
		list = append(list, layers.Environment{Ref: applied.Ref, Spec: applied.Spec})
		r.Environments = append(r.Environments, applied.Ref)
	}
	var err error
	if r.Variables, err = layers.Merge(r.agent.Environment, list, t.message.Environment); err != nil {
		return mismatch(err)
	}
	r.Egress, err = hosts(t.l.Life.Options.Egress, r.agent.Egress, list)
	return err
}

// mismatch is an error of variables as the end of an execution.
func mismatch(err error) error {
	var wrong *layers.Error
	if errors.As(err, &wrong) {
		return &unresolved{wrong.Code, err}
	}
	return err
}

// open fills in values, and brings skills to the engine.
func (t *turn) open(ctx context.Context, r *resolution) error {
	for _, v := range r.Variables {
		if !v.Secret {
			r.values[v.Name] = v.Value
			continue
		}
		if t.w.d.Secrets == nil {
			return &unresolved{"SECRETS_UNAVAILABLE", fmt.Errorf("variable %s is a secret, and this executor has no key to open it: set its secrets identity", v.Name)}
		}
		value, err := t.w.d.Secrets.Open(ctx, owner(v, t.l.Tenant), v.Sealed)
		if errors.Is(err, secret.ErrUnavailable) {
			return fmt.Errorf("variable %s: %w", v.Name, err) // it is tried again
		}
		if err != nil {
			return &unresolved{"SECRET_UNREADABLE", fmt.Errorf("variable %s: %w", v.Name, err)}
		}
		r.values[v.Name], r.secrets = value, append(r.secrets, value)
	}
	return t.shelve(ctx, r)
}

// shelving is how many skills of one execution are brought to the engine at a time.
const shelving = 32

// shelve brings skills to the engine. One that is gone is said in the log.
func (t *turn) shelve(ctx context.Context, r *resolution) error {
	if len(r.skills) == 0 {
		return nil
	}
	if t.w.d.Skills == nil {
		return &unresolved{"SKILL_UNAVAILABLE", errors.New("this executor has no store of skills")}
	}
	errs := make([]error, len(r.skills))
	var all errgroup.Group
	all.SetLimit(shelving)
	for i, used := range r.Skills {
		if slices.Contains(r.gone, used.Ref.Version) {
			continue
		}
		all.Go(func() error {
			r.skills[i].Dir, errs[i] = t.w.d.Skills.Provide(ctx, used.Ref.Version)
			return nil
		})
	}
	_ = all.Wait() // each has its own error
	said := map[string]bool{}
	for i, used := range r.Skills {
		if said[used.Ref.Version] {
			continue // the agent's, and a sub-agent's
		}
		said[used.Ref.Version] = true
		switch err := errs[i]; {
		case slices.Contains(r.gone, used.Ref.Version):
			if err := t.say(ctx, events.Error{Code: "SKILL_REMOVED", Message: fmt.Sprintf("skill %s was removed: the agent gets its SKILL.md alone", used.Ref)}); err != nil {
				return err
			}
		case errors.Is(err, ErrNoSkill):
			t.log.Warn("a skill's archive is missing; its SKILL.md alone is used", "skill", used.Ref.String(), "error", err)
			missing := events.Error{Code: "SKILL_ARCHIVE_MISSING", Message: fmt.Sprintf("the archive of skill %s is not in the object store: the agent gets its SKILL.md alone", used.Ref)}
			if err := t.say(ctx, missing); err != nil {
				return err
			}
		case err != nil:
			return fmt.Errorf("bring skill %s to the engine: %w", used.Ref, err)
		}
	}
	return nil
}

// stock makes sure that the turn's sandbox has its skills.
func (t *turn) stock(ctx context.Context) error {
	s, ok := t.w.d.Sandbox.(stocker)
	if !ok || t.resolution == nil {
		return nil
	}
	var digests []string
	for i, used := range t.resolution.Skills {
		if t.resolution.skills[i].Dir != "" {
			digests = append(digests, used.Ref.Version)
		}
	}
	if len(digests) == 0 {
		return nil
	}
	err := t.w.patiently(ctx, t.agent.sandbox, func() error { return s.Stock(ctx, t.agent.sandbox, digests) })
	if errors.Is(err, sandbox.ErrNotFound) {
		return fmt.Errorf("%w: %w", errLost, err)
	}
	return err
}

// owner is whose a secret is: the platform's environments have the platform's.
func owner(v events.Provenance, tenant string) string {
	if v.From == layers.FromRun || v.From == layers.FromAgent {
		return tenant
	}
	ref, err := events.ParseReference(v.From)
	if err != nil {
		return tenant
	}
	return ref.Tenant(tenant)
}

// complete fills in the placeholders of MCP servers.
func (r *resolution) complete() error {
	value := func(name string) (string, bool) {
		v, ok := r.values[name]
		return v, ok
	}
	var wrong []error
	fill := func(s string) string {
		out, err := layers.Expand(s, value)
		wrong = append(wrong, err)
		return out
	}
	servers := make([]events.MCPServer, len(r.agent.MCPServers))
	for i, m := range r.agent.MCPServers {
		m.URL, m.Command = fill(m.URL), slices.Clone(m.Command)
		for j := range m.Command {
			m.Command[j] = fill(m.Command[j])
		}
		m.Env, m.Headers = filled(m.Env, fill), filled(m.Headers, fill)
		servers[i] = m
	}
	r.agent.MCPServers = servers
	return mismatch(errors.Join(wrong...))
}

func filled(in map[string]string, fill func(string) string) map[string]string {
	if in == nil {
		return nil
	}
	out := make(map[string]string, len(in))
	for _, k := range slices.Sorted(maps.Keys(in)) {
		out[k] = fill(in[k])
	}
	return out
}

// mcpTimeout is how long a call of an MCP server may take where its definition says nothing.
const mcpTimeout = 30_000 // milliseconds

// into adds to a query what the agent is made of. Where there is a proxy, MCP
// servers are reached through it, and it alone knows their headers.
func (r *resolution) into(q *runner.Query, proxied bool) {
	a := r.agent
	q.SystemPrompt, q.MemoryFile, q.Tools, q.Commands, q.MaxTurns = r.told(a.Instructions, ""), a.MemoryFile, a.Tools, a.Commands, a.Limits.Turns
	for _, sub := range a.Subagents {
		sub.Instructions, sub.Skills = r.told(sub.Instructions, sub.Name), nil
		q.Subagents = append(q.Subagents, sub)
	}
	for _, s := range r.skills { // the agent's own come first
		if s.Dir != "" && !slices.ContainsFunc(q.Skills, func(other runner.Skill) bool { return other.Dir == s.Dir }) {
			q.Skills = append(q.Skills, s)
		}
	}
	sockets := r.sockets
	for _, m := range a.MCPServers {
		socket := ""
		if m.Type == events.MCPDocker && len(sockets) > 0 {
			socket, sockets = sockets[0], sockets[1:]
		}
		if proxied && m.Type == events.MCPHTTP {
			m.URL, m.Headers = runner.EgressURL+runner.EgressMCP+m.Name, nil
		}
		q.MCPServers = append(q.MCPServers, runner.MCPServer{
			Name: m.Name, Type: m.Type, Socket: socket, Command: m.Command, Env: m.Env, URL: m.URL, Headers: m.Headers, TimeoutMs: cmp.Or(m.TimeoutMs, mcpTimeout), Tools: m.Tools,
		})
	}
	for name, value := range r.values {
		if _, ours := q.Env[name]; !ours {
			q.Env[name] = value
		}
	}
	q.Redact = r.secrets
}

// told are instructions with what is said of the skills of a sub-agent, or, with "", of the agent itself.
func (r *resolution) told(instructions, subagent string) string {
	var list []skill.Prompted
	for i, s := range r.skills {
		if r.Skills[i].Subagent == subagent {
			list = append(list, skill.Prompted{Name: s.Name, Description: s.Description, Dir: s.Dir, Document: r.texts[i]})
		}
	}
	if len(list) == 0 {
		return instructions
	}
	return strings.TrimPrefix(instructions+"\n\n"+skill.Prompt(list, skill.PromptBudget), "\n\n")
}

// recorded is the execution_resolved that is in the log.
func (t *turn) recorded(ctx context.Context) (events.ExecutionResolved, error) {
	at := eventlog.Position{Shard: t.l.RunHead.Subject.Partition() % t.w.d.Sessions.Log.Shards(), Seq: t.l.Run.Resolved.At}
	rec, err := t.w.d.Sessions.Log.At(ctx, at)
	if err != nil {
		return events.ExecutionResolved{}, fmt.Errorf("read what %s resolved to: %w", t.execution, err)
	}
	for _, e := range rec.Events {
		if d, ok := e.Data.(events.ExecutionResolved); ok && e.ExecutionID == t.execution {
			return d, nil
		}
	}
	return events.ExecutionResolved{}, fmt.Errorf("commit %s does not hold what %s resolved to", at, t.execution)
}

// lookUp finds a version of a catalogue entry; one that is not there ends the execution.
func lookUp[P events.Payload](ctx context.Context, t *turn, kind events.Aspect, ref events.Reference) (P, error) {
	var out P
	p, err := eventlog.Entries{Log: t.w.d.Sessions.Log}.Resolve(ctx, kind, t.l.Tenant, ref)
	var none *eventlog.VersionError
	if errors.As(err, &none) {
		return out, &unresolved{strings.ToUpper(string(kind)) + "_NOT_FOUND", err}
	}
	if err != nil {
		return out, err
	}
	out, ok := p.(P)
	if !ok {
		return out, fmt.Errorf("%s %s is a %T", kind, ref, p)
	}
	return out, nil
}
