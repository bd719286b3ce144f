package reads_test

import (
	"encoding/json"
	"os"
	"reflect"
	"testing"

	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// TestBlockMessage_HasTheJSONOfTheBlock tests that REST returns a block of each kind as the reducer's vectors have it.
func TestBlockMessage_HasTheJSONOfTheBlock(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"every-block-kind", "plans"} {
		raw, err := os.ReadFile("../../../../pkg/events/blocks/testdata/" + name + ".json")
		if err != nil {
			t.Fatal(err)
		}
		var vector struct{ Blocks []json.RawMessage }
		if err := json.Unmarshal(raw, &vector); err != nil || len(vector.Blocks) == 0 {
			t.Fatalf("%s has %d blocks, %v", name, len(vector.Blocks), err)
		}
		for _, stored := range vector.Blocks {
			var b events.Block
			var want, got any
			if err := json.Unmarshal(stored, &b); err != nil {
				t.Fatal(err)
			}
			if err := json.Unmarshal(stored, &want); err != nil {
				t.Fatal(err)
			}
			if err := json.Unmarshal(wirejson.Marshal(reads.BlockMessage(b)), &got); err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("%s: got\n%v\nwant\n%v", b.ID, got, want)
			}
		}
	}
}
