package command

import (
	"context"
	"fmt"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// handleBudget sets or removes a tenant's budget for a period. Each budget has a subject of its own in the log, whose
// last event is in force.
func (h *Handler) handleBudget(ctx context.Context, c command.Command) (command.Answer, error) {
	var period events.Period
	var data events.Payload
	if c.Type == command.TypeSetBudget {
		var b command.SetBudget
		if err := decodeBody(c, &b); err != nil {
			return command.Answer{}, err
		}
		if err := command.CheckBudget("budget", b.Budget); err != nil {
			return command.Answer{}, err
		}
		if b.Budget == (events.Budget{}) {
			return command.Answer{}, invalidFieldError("budget", "the budget has no limit: set turns, tokens, costUsd or timeMs, or remove the budget")
		}
		period, data = b.Period, events.TenantBudgetSet{Tenant: c.Tenant, Period: b.Period, Budget: b.Budget}
	} else {
		var b command.RemoveBudget
		if err := decodeBody(c, &b); err != nil {
			return command.Answer{}, err
		}
		period, data = b.Period, events.TenantBudgetRemoved{Tenant: c.Tenant, Period: b.Period}
	}
	if err := events.CheckPeriod("period", period); err != nil {
		return command.Answer{}, invalidFieldError("period", err.Error())
	}
	notFound := &command.Error{Code: "BUDGET_NOT_FOUND", Field: "period", Detail: "the tenant has no such budget"}
	return h.appendTenantEvent(ctx, c, events.BudgetSubject(c.Tenant, period), data, notFound)
}

// appendTenantEvent appends an event that sets or removes a budget or limits of a tenant to a subject, whose last event
// is in force. It appends nothing if that event already has this data. For a removal it returns notFound if no event is
// in force.
func (h *Handler) appendTenantEvent(ctx context.Context, c command.Command, subject events.Subject, data events.Payload, notFound *command.Error) (command.Answer, error) {
	at := eventlog.Position{Shard: subject.Partition() % h.cfg.Sessions.Log.Shards()}
	err := eventlog.RetryOnConflict(func() error {
		head, err := h.cfg.Sessions.Log.Last(ctx, subject, eventlog.LeaderOnly)
		if err != nil {
			return err
		}
		present, err := eventInForce(head)
		if err != nil {
			return err
		}
		at.Seq = head.Seq
		done, err := eventlog.HasCommand(ctx, h.cfg.Sessions.Log, head, c.ID)
		if err != nil || done {
			return err
		}
		if present == nil && !setsBudgetOrLimits(data) {
			return notFound
		}
		if present == data {
			return nil
		}
		m := events.NewEventList(events.CommandMeta{CommandID: c.ID, Now: h.cfg.Now()})
		m.Add("", data)
		head, err = h.cfg.Sessions.Log.Append(ctx, head, events.Draft{
			ID: events.DeriveID(events.KindCommit, c.ID), Actor: c.Actor, Events: m.Events(),
		})
		at.Seq = head.Seq
		return err
	})
	if err != nil {
		return command.Answer{}, fmt.Errorf("append to %s: %w", subject, err)
	}
	return command.Answer{Position: at.String()}, nil
}

// setsBudgetOrLimits reports whether an event sets a tenant's budget or limits. It returns false for an event that
// removes them.
func setsBudgetOrLimits(data events.Payload) bool {
	switch data.(type) {
	case events.TenantBudgetSet, events.TenantLimitsSet:
		return true
	}
	return false
}

// eventInForce returns the event in a subject's last commit if it sets something, or nil if there is no commit or its
// event removes what was set.
func eventInForce(head eventlog.Head) (events.Payload, error) {
	if head.Seq == 0 {
		return nil, nil
	}
	list, err := head.Commit.DecodeEvents()
	if err != nil {
		return nil, err
	}
	for _, e := range list {
		if setsBudgetOrLimits(e.Data) {
			return e.Data, nil
		}
	}
	return nil, nil
}
