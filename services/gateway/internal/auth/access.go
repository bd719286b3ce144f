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

// access is what a method of spool.v1, or an HTTP route that has no such method, requires of the caller's API key.
type access struct {
	role events.KeyRole
	// shared means that the method concerns data of all agents of the tenant: a key that is limited to agents may not
	// call it.
	shared bool
}

func use() access     { return access{role: events.RoleUse} }
func operate() access { return access{role: events.RoleOperate} }
func admin() access   { return access{role: events.RoleAdmin} }

// withShared returns the access n with shared set.
func withShared(n access) access { return access{n.role, true} }

// requiredAccess maps methods of spool.v1 (full names without the package) and HTTP routes without a method (METHOD and
// pattern) to the access that they require. It is the only such table.
var requiredAccess = map[string]access{
	"Sessions/CreateSession": use(), "Sessions/ForkSession": use(), "Sessions/ListSessions": use(), "Sessions/GetSession": use(), "Sessions/UpdateSession": use(),
	"Sessions/PostMessage": use(), "Sessions/InterruptSession": use(), "Sessions/SyncSession": use(), "Sessions/TerminateEnvironment": use(),
	"Sessions/ListConversations": use(), "Sessions/DeleteSession": operate(),
	"Sessions/GetSessionState": use(), "Sessions/DiffSession": use(), "Sessions/CompareSessions": use(),

	"Executions/StartExecution": use(), "Executions/ListExecutions": use(), "Executions/ListSessionExecutions": use(), "Executions/GetExecution": use(),
	"Executions/CancelExecution": use(), "Executions/PauseExecution": use(), "Executions/ResumeExecution": use(), "Executions/TerminateExecution": use(),
	"Executions/RecoverExecution": use(), "Executions/WatchExecution": use(),

	"Approvals/ListApprovals": use(), "Approvals/GetApproval": use(), "Approvals/DecideApproval": use(),

	"Events/ListEvents": use(), "Events/StreamEvents": use(), "Events/ReplayEvents": use(), "Events/ListBlocks": use(),
	"Events/ListHistory": use(), "Events/ListHistoryBlocks": use(),

	"Keys/CreateKey": admin(), "Keys/ListKeys": admin(), "Keys/RevokeKey": admin(),

	// The methods that change something also require the root key, which their handlers check.
	"Budgets/ListBudgets": withShared(operate()), "Budgets/SetBudget": withShared(admin()), "Budgets/RemoveBudget": withShared(admin()),
	"Limits/GetLimits": withShared(operate()), "Limits/SetLimits": withShared(admin()), "Limits/RemoveLimits": withShared(admin()),

	"DeadLetters/ListDeadLetters": withShared(operate()), "DeadLetters/GetDeadLetter": withShared(operate()),
	"DeadLetters/RetryDeadLetter": withShared(operate()), "DeadLetters/DropDeadLetter": withShared(operate()),

	"Audit/ListAudit": withShared(admin()),

	"Agents/ListAgents": use(), "Agents/GetAgent": use(), "Agents/ApplyAgent": operate(), "Agents/RemoveAgent": operate(),
	"Instances/ListInstances": use(), "Instances/GetInstance": use(),
	"Instances/ApplyInstance": withShared(operate()), "Instances/RemoveInstance": withShared(operate()),
	"Environments/ListEnvironments": use(), "Environments/GetEnvironment": use(), "Environments/ExplainEnvironment": use(),
	"Environments/ApplyEnvironment": withShared(operate()), "Environments/RemoveEnvironment": withShared(operate()),
	"Skills/ListSkills": use(), "Skills/GetSkill": use(), "Skills/TagSkill": withShared(operate()), "Skills/RemoveSkill": withShared(operate()),

	"GET /api/ws": use(),
	"GET /api/sessions/{session_id}/events/stream":   use(),
	"GET /api/sessions/{session_id}/files":           use(),
	"PUT /api/sessions/{session_id}/files":           use(),
	"GET /api/sessions/{session_id}/files/{path}":    use(),
	"PUT /api/sessions/{session_id}/files/{path}":    use(),
	"DELETE /api/sessions/{session_id}/files/{path}": use(),
	"POST /api/transcripts":                          use(),
	"POST /api/skills":                               withShared(operate()),
	"GET /api/skills/{slug}/archive":                 use(),
}

// methodPrefix is the prefix of the full names of the methods of spool.v1.
const methodPrefix = "/spool.v1."

// CheckAccess returns an error unless requiredAccess contains exactly the methods of spool.v1.
func CheckAccess() error {
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

// Allow returns FORBIDDEN unless the key of the request's principal may call a method of spool.v1, given by its full
// name, or a route, given as METHOD and pattern. For a name that is not in requiredAccess Allow returns INTERNAL, so that
// nobody may call it.
func Allow(ctx context.Context, name string) error {
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
