package eventlog_test

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"strings"
	"sync"
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// TestSign_CoversSubjectHashStateAndCommand computes signatures independently, while several goroutines sign with the same key.
func TestSign_CoversSubjectHashStateAndCommand(t *testing.T) {
	t.Parallel()
	secret := strings.Repeat("s", 40)
	keys, err := eventlog.ParseKeys("executor:"+secret, "executor")
	if err != nil {
		t.Fatal(err)
	}
	s := events.RunSubject("default", events.DeriveID(events.KindSession, "signed"))
	var wg sync.WaitGroup
	for _, c := range []events.Commit{
		{Hash: "aa", State: []byte(`{"v":1}`), Command: "cmd_1"},
		{Hash: "bb"},
		{Hash: "cc", State: []byte(`"` + strings.Repeat("x", 5000) + `"`)},
	} {
		mac := hmac.New(sha256.New, []byte(secret))
		for _, part := range []string{s.String(), c.Hash, string(c.State), c.Command} {
			mac.Write(binary.BigEndian.AppendUint64(nil, uint64(len(part))))
			mac.Write([]byte(part))
		}
		want := keys.SigningKey() + "/" + hex.EncodeToString(mac.Sum(nil))
		for range 4 {
			wg.Go(func() {
				for range 50 {
					if got := keys.Sign(s, c); got != want {
						t.Errorf("the signature of commit %s is %s, want %s", c.Hash, got, want)
					}
				}
			})
		}
	}
	wg.Wait()
}
