package events_test

import (
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

func TestKeyRights_Excess(t *testing.T) {
	t.Parallel()
	soon, late := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC)
	for name, c := range map[string]struct {
		own, other events.KeyRights
		want       string
	}{
		"a key without a role is an admin":          {events.KeyRights{Role: "admin"}, events.KeyRights{}, ""},
		"no role exceeds operate":                   {events.KeyRights{}, events.KeyRights{Role: "operate"}, "role"},
		"operate exceeds use":                       {events.KeyRights{Role: "operate"}, events.KeyRights{Role: "use"}, "role"},
		"use is within operate":                     {events.KeyRights{Role: "use"}, events.KeyRights{Role: "operate"}, ""},
		"an unknown role exceeds every role":        {events.KeyRights{Role: "owner"}, events.KeyRights{}, "role"},
		"nothing is within an unknown role":         {events.KeyRights{Role: "use"}, events.KeyRights{Role: "owner"}, "role"},
		"all agents exceed one":                     {events.KeyRights{}, events.KeyRights{Agents: []string{"a"}}, "agents"},
		"another agent exceeds":                     {events.KeyRights{Agents: []string{"a", "b"}}, events.KeyRights{Agents: []string{"a"}}, "agents"},
		"some of the agents are within":             {events.KeyRights{Agents: []string{"b"}}, events.KeyRights{Agents: []string{"a", "b"}}, ""},
		"one agent is within all":                   {events.KeyRights{Agents: []string{"b"}}, events.KeyRights{}, ""},
		"no expiry exceeds an expiry":               {events.KeyRights{}, events.KeyRights{ExpiresAt: soon}, "expires"},
		"a later expiry exceeds":                    {events.KeyRights{ExpiresAt: late}, events.KeyRights{ExpiresAt: soon}, "expires"},
		"the same expiry is within":                 {events.KeyRights{ExpiresAt: soon}, events.KeyRights{ExpiresAt: soon}, ""},
		"an expiry is within no expiry":             {events.KeyRights{ExpiresAt: late}, events.KeyRights{}, ""},
		"an earlier expiry does not make up a role": {events.KeyRights{Role: "admin", ExpiresAt: soon}, events.KeyRights{Role: "use"}, "role"},
	} {
		if got := c.own.FirstExcess(c.other); got != c.want {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
}
