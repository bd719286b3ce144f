package auth

import (
	"context"
	"errors"
	"fmt"
	"strings"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// access is the role that an API key needs to call a method of spool.v1, or an HTTP route that has no such method.
type access struct {
	role events.KeyRole
	// shared means that the method concerns data of all agents of the tenant: a key that is limited to agents may not
	// call it.
	shared bool
	// public means that a caller needs no key.
	public bool
}

// useAccess requires the role use.
func useAccess() access { return access{role: events.RoleUse} }

// operateAccess requires the role operate.
func operateAccess() access { return access{role: events.RoleOperate} }

// adminAccess requires the role admin.
func adminAccess() access { return access{role: events.RoleAdmin} }

// forWholeTenant returns the access n with shared set, so that keys which are limited to agents are refused.
func forWholeTenant(n access) access { return access{role: n.role, shared: true} }

// publicAccess requires no key.
func publicAccess() access { return access{public: true} }

// requiredAccess maps methods of spool.v1 (full names without the package) and HTTP routes without a method (METHOD and
// pattern) to the access that they require. It is the only such table.
var requiredAccess = map[string]access{
	"Sessions/CreateSession": useAccess(), "Sessions/ForkSession": useAccess(), "Sessions/ListSessions": useAccess(), "Sessions/StreamSessions": useAccess(), "Sessions/GetSession": useAccess(), "Sessions/UpdateSession": useAccess(),
	"Sessions/PostMessage": useAccess(), "Sessions/InterruptSession": useAccess(), "Sessions/SyncSession": useAccess(), "Sessions/TerminateEnvironment": useAccess(),
	"Sessions/ListConversations": useAccess(), "Sessions/DeleteSession": operateAccess(),
	"Sessions/GetSessionState": useAccess(), "Sessions/DiffSession": useAccess(), "Sessions/CompareSessions": useAccess(),

	"Executions/StartExecution": useAccess(), "Executions/ListExecutions": useAccess(), "Executions/ListSessionExecutions": useAccess(), "Executions/GetExecution": useAccess(),
	"Executions/CancelExecution": useAccess(), "Executions/PauseExecution": useAccess(), "Executions/ResumeExecution": useAccess(), "Executions/TerminateExecution": useAccess(),
	"Executions/RecoverExecution": useAccess(), "Executions/WatchExecution": useAccess(),

	"Approvals/ListApprovals": useAccess(), "Approvals/GetApproval": useAccess(), "Approvals/DecideApproval": useAccess(),

	"Events/ListEvents": useAccess(), "Events/StreamEvents": useAccess(), "Events/ReplayEvents": useAccess(), "Events/ListBlocks": useAccess(),
	"Events/ListHistory": useAccess(), "Events/ListHistoryBlocks": useAccess(),

	"Keys/CreateKey": adminAccess(), "Keys/ListKeys": adminAccess(), "Keys/RevokeKey": adminAccess(),

	"SignIn/CreateSignInCode": useAccess(), "SignIn/ExchangeSignInCode": publicAccess(),

	// The methods that change something also require the root key, which their handlers check.
	"Budgets/ListBudgets": forWholeTenant(operateAccess()), "Budgets/SetBudget": forWholeTenant(adminAccess()), "Budgets/RemoveBudget": forWholeTenant(adminAccess()),
	"Limits/GetLimits": forWholeTenant(operateAccess()), "Limits/SetLimits": forWholeTenant(adminAccess()), "Limits/RemoveLimits": forWholeTenant(adminAccess()),

	"DeadLetters/ListDeadLetters": forWholeTenant(operateAccess()), "DeadLetters/GetDeadLetter": forWholeTenant(operateAccess()),
	"DeadLetters/RetryDeadLetter": forWholeTenant(operateAccess()), "DeadLetters/DropDeadLetter": forWholeTenant(operateAccess()),

	"Audit/ListAudit": forWholeTenant(adminAccess()),

	"Agents/ListAgents": useAccess(), "Agents/GetAgent": useAccess(), "Agents/ApplyAgent": operateAccess(), "Agents/RemoveAgent": operateAccess(),
	"Instances/ListInstances": useAccess(), "Instances/GetInstance": useAccess(),
	"Instances/ApplyInstance": forWholeTenant(operateAccess()), "Instances/RemoveInstance": forWholeTenant(operateAccess()),
	"Environments/ListEnvironments": useAccess(), "Environments/GetEnvironment": useAccess(), "Environments/ExplainEnvironment": useAccess(),
	"Environments/ApplyEnvironment": forWholeTenant(operateAccess()), "Environments/RemoveEnvironment": forWholeTenant(operateAccess()),
	"Skills/ListSkills": useAccess(), "Skills/GetSkill": useAccess(), "Skills/TagSkill": forWholeTenant(operateAccess()), "Skills/RemoveSkill": forWholeTenant(operateAccess()),

	"GET /api/ws": useAccess(), "GET /api/sessions/stream": useAccess(),
	"GET /api/sessions/{session_id}/events/stream":   useAccess(),
	"GET /api/sessions/{session_id}/files":           useAccess(),
	"PUT /api/sessions/{session_id}/files":           useAccess(),
	"GET /api/sessions/{session_id}/files/{path}":    useAccess(),
	"PUT /api/sessions/{session_id}/files/{path}":    useAccess(),
	"DELETE /api/sessions/{session_id}/files/{path}": useAccess(),
	"POST /api/transcripts":                          useAccess(),
	"POST /api/skills":                               forWholeTenant(operateAccess()),
	"GET /api/skills/{slug}/archive":                 useAccess(),
}

// methodPrefix is the prefix of the full names of the methods of spool.v1.
const methodPrefix = "/spool.v1."

// CheckAccessTable returns an error unless requiredAccess contains exactly the methods of spool.v1.
func CheckAccessTable() error {
	var wrong []error
	left := map[string]bool{}
	for name := range requiredAccess {
		left[name] = !strings.Contains(name, " ")
	}
	services := spoolv1.File_spool_v1_spool_proto.Services()
	for i := range services.Len() {
		for j := range services.Get(i).Methods().Len() {
			name := fmt.Sprintf("%s/%s", services.Get(i).Name(), services.Get(i).Methods().Get(j).Name())
			if _, ok := requiredAccess[name]; !ok {
				wrong = append(wrong, fmt.Errorf("auth: no role is set for method %s", name))
			}
			delete(left, name)
		}
	}
	for name, method := range left {
		if method {
			wrong = append(wrong, fmt.Errorf("auth: a role is set for method %s, which does not exist", name))
		}
	}
	return errors.Join(wrong...)
}

// IsPublic reports whether a method of spool.v1, by its full name, needs no key.
func IsPublic(name string) bool { return requiredAccess[strings.TrimPrefix(name, methodPrefix)].public }

// CheckAllowed returns FORBIDDEN unless the API key of the request's principal may call a method of spool.v1 or a
// route. name is the full name of the method, or the METHOD and pattern of the route. For a name that is not in
// requiredAccess it returns INTERNAL, so that nobody may call it.
func CheckAllowed(ctx context.Context, name string) error {
	if IsPublic(name) {
		return nil
	}
	p, err := From(ctx)
	if err != nil {
		return err
	}
	n, ok := requiredAccess[strings.TrimPrefix(name, methodPrefix)]
	switch {
	case !ok:
		return problem.From(fmt.Errorf("auth: no role is set for %s", name))
	case p.Admin:
		return nil
	case !p.Role.Includes(n.role):
		return problem.New(problem.Forbidden, "Authorization", fmt.Sprintf("this needs a key with role %s; the key has role %s", n.role, p.Role))
	case n.shared && len(p.Agents) > 0:
		return problem.New(problem.Forbidden, "Authorization", "this concerns all agents of the tenant; the key is limited to the agents "+strings.Join(p.Agents, ", "))
	}
	return nil
}
