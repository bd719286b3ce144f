package e2e

import (
	"encoding/json"
	"net/http"
	"sync"
	"testing"

	"github.com/spoolhq/spool/services/gateway"
	"github.com/spoolhq/spool/test/e2e/harness"
)

const rootKeyOfKeys = "the-root-key-of-the-test-of-the-keys"

// keyMade is a new key; the gateway shows the key itself only once.
type keyMade struct{ KeyID, Key, Role string }

// makes creates a key and waits until it is accepted.
func (k keyHolder) makes(body map[string]any) (keyMade, keyHolder) {
	k.t.Helper()
	var made keyMade
	k.gets(http.StatusCreated, "POST", "/api/keys", body, &made)
	other := withKey(k.t, k.c, made.Key)
	harness.Eventually(k.t, "the new key is accepted", func() bool {
		status, _ := other.asks("GET", "/api/sessions", nil)
		return status == http.StatusOK
	})
	return made, other
}

// TestKeys_RightsOverTheWholeStack tests that roles, agents, makers and revocation apply in the whole stack, from the
// gateway through the log to Postgres and back.
func TestKeys_RightsOverTheWholeStack(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Gateway: gateway.Config{Auth: gateway.AuthKeys, RootKey: rootKeyOfKeys}})
	root := withKey(t, c, rootKeyOfKeys)
	parent, admin := root.makes(map[string]any{"name": "parent", "tenant": "acme"})
	if parent.Role != "admin" {
		t.Errorf("the root key created a key of role %q", parent.Role)
	}
	child, user := admin.makes(map[string]any{"name": "child", "role": "use", "agents": []string{"default"}, "expires": "1h"})
	user.gets(http.StatusForbidden, "POST", "/api/keys", map[string]any{"name": "x"}, nil)
	admin.gets(http.StatusForbidden, "PUT", "/api/limits", map[string]any{"limits": map[string]any{"keys": 5}}, nil)
	admin.gets(http.StatusOK, "POST", "/api/agents", map[string]any{"ref": map[string]any{"slug": "reviewer"}, "spec": map[string]any{"architecture": "spool", "instructions": "You review code with care."}}, nil)
	var theirs, mine struct{ SessionID string }
	admin.gets(http.StatusCreated, "POST", "/api/sessions", map[string]any{"agent": "reviewer"}, &theirs)
	user.gets(http.StatusCreated, "POST", "/api/sessions", map[string]any{}, &mine)
	user.gets(http.StatusForbidden, "POST", "/api/sessions", map[string]any{"agent": "reviewer"}, nil)
	user.gets(http.StatusOK, "GET", "/api/sessions/"+mine.SessionID, nil, nil)
	user.gets(http.StatusNotFound, "GET", "/api/sessions/"+theirs.SessionID, nil, nil)
	user.gets(http.StatusNotFound, "POST", "/api/sessions/"+theirs.SessionID+"/interrupt", nil, nil)
	user.gets(http.StatusForbidden, "DELETE", "/api/sessions/"+mine.SessionID, nil, nil)
	var list struct {
		Keys []struct{ KeyID, Role, CreatedBy, ExpiresAt string }
	}
	admin.gets(http.StatusOK, "GET", "/api/keys", nil, &list)
	if got := list.Keys[0]; len(list.Keys) != 2 || got.KeyID != child.KeyID || got.Role != "use" || got.CreatedBy != parent.KeyID || got.ExpiresAt == "" {
		t.Errorf("the keys are %+v", list.Keys)
	}
	var revoked struct{ Revoked []string }
	root.gets(http.StatusOK, "DELETE", "/api/keys/"+parent.KeyID+"?tenant=acme", nil, &revoked)
	if len(revoked.Revoked) != 1 || revoked.Revoked[0] != child.KeyID {
		t.Errorf("keys revoked with the parent: %v", revoked.Revoked)
	}
	for _, k := range []keyHolder{admin, user} {
		k.gets(http.StatusUnauthorized, "GET", "/api/sessions", nil, nil)
	}
}

// TestKeys_RevocationWhileTheKeyMakesKeys tests a key that creates keys while it is revoked. After the answer to the
// revocation, none of the keys that it created works.
func TestKeys_RevocationWhileTheKeyMakesKeys(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Gateway: gateway.Config{Auth: gateway.AuthKeys, RootKey: rootKeyOfKeys}})
	root := withKey(t, c, rootKeyOfKeys)
	for round := range 3 {
		parent, admin := root.makes(map[string]any{"name": "parent"})
		var mu sync.Mutex
		var keys []string
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				for {
					var made keyMade
					status, raw := admin.asks("POST", "/api/keys", map[string]any{"name": "child"})
					if status == http.StatusServiceUnavailable { // the request created no key
						continue
					}
					if status != http.StatusCreated {
						if status != http.StatusUnauthorized {
							t.Errorf("answered %d %s", status, raw)
						}
						return
					}
					if err := json.Unmarshal(raw, &made); err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					keys = append(keys, made.Key)
					mu.Unlock()
				}
			})
		}
		harness.Eventually(t, "the key creates keys", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(keys) > 0 || t.Failed()
		})
		root.gets(http.StatusOK, "DELETE", "/api/keys/"+parent.KeyID, nil, nil)
		mu.Lock()
		early := append([]string(nil), keys...)
		mu.Unlock()
		for _, key := range early { // without any wait
			withKey(t, c, key).gets(http.StatusUnauthorized, "GET", "/api/sessions", nil, nil)
		}
		wg.Wait()
		for _, key := range keys {
			withKey(t, c, key).gets(http.StatusUnauthorized, "GET", "/api/sessions", nil, nil)
		}
		if t.Failed() {
			t.Fatalf("in round %d", round)
		}
	}
}
