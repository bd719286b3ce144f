package live

import (
	"bytes"
	"encoding/json"
	"slices"
	"testing"
)

func TestSplitMessage_TakesTheFormOfProjectors(t *testing.T) {
	t.Parallel()
	for _, data := range []string{
		`{"sessionId":"ses_1","tip":0,"events":[]}`,
		`{"sessionId":"ses_1","tip":4294967295,"events":[{"seq":1,"data":{"text":"}],[\"\\"}}]}`,
		`{"sessionId":"ses_1","tip":2,"events":[{"seq":1},{"seq":2,"data":{"a":[[{}]]}}]}`,
	} {
		var want liveMessage
		if err := json.Unmarshal([]byte(data), &want); err != nil {
			t.Fatal(err)
		}
		if got, ok := splitLiveMessage([]byte(data)); !ok || !sameMessage(got, want) {
			t.Errorf("%s: got %+v, %v, want %+v", data, got, ok, want)
		}
	}
}

func sameMessage(a, b liveMessage) bool {
	same := func(x, y json.RawMessage) bool { return bytes.Equal(x, y) }
	return a.Tip == b.Tip && slices.EqualFunc(a.Events, b.Events, same)
}

// FuzzDecodeMessage tests that a message whose parts are valid JSON is decoded as by json.Unmarshal, and that an invalid
// message is refused or has an invalid part.
func FuzzDecodeMessage(f *testing.F) {
	for _, seed := range []string{
		`{"sessionId":"s","tip":1,"events":[{"a":1},{"b":"\""}]}`, `{"sessionId":"s","tip":01,"events":[]}`,
		`{"sessionId":"s","tip":1,"events":[{]}]}`, `{"sessionId":"s","tip":1,"events":[{},]}`,
		`{"sessionId":"s","tip":1,"events":null}`, `{"sessionId":"s","tip":1,"events":[1]} `,
		`{"sessionId":"","tip":1,"events":[],"tip":2}`, `{"tip":`,
		`{"sessionId":"s","tip":1,"events":[],"deltas":[{"delta":"x"}]}`, // of a projector of an earlier build
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := decodeLiveMessage(data)
		var want liveMessage
		wantErr := json.Unmarshal(data, &want)
		valid := err == nil
		for _, part := range got.Events {
			valid = valid && json.Valid(part)
		}
		if valid != (wantErr == nil) || valid && !sameMessage(got, want) {
			t.Fatalf("got %+v, %v, want %+v, %v", got, err, want, wantErr)
		}
	})
}
