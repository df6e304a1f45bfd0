package resendapi

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzScan: what the scanner reads, encoding/json reads alike, and it reads all
// plain mails.
func FuzzScan(f *testing.F) {
	for _, s := range []string{
		mailTo("ann@x.test"), `{}`, ` { "to" : "a" , "cc" : [ ] } `, `{"text":"a\"b\\","html":"\u00e9é"}`, `{"text":"\x"}`, `{"to":["a","b\n"]}`,
		`{"headers":{"a":"}"},"tags":[{"name":"a","value":"]"}]}`, `{"headers":{"a":1}}`, `{"from":"a","from":"b"}`, `{"to":["a"],"to":["b","c"]}`,
		`{"from":"a",}`, `{"from":"a"} x`, `{"text":"` + "\xff" + `"}`, `{"headers":null}`, `{"tags":[}]}`, "{\"from\":\"\x01\"}", `{"to":[,"a"]}`, `{,"to":"a"}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var got, want mail
		if !got.scan(b) {
			return
		}
		require.NoError(t, json.Unmarshal(b, &want), "%q", b)
		got.raw, want.raw = nil, nil
		require.Equal(t, want.HTML.String(), got.HTML.String())
		require.Equal(t, want.Text.String(), got.Text.String())
		got.HTML, got.Text, want.HTML, want.Text = nil, nil, nil, nil
		require.Equal(t, want, got, "%q", b)
	})
}

func TestScanReadsPlainMails(t *testing.T) {
	for _, s := range []string{
		mailTo("ann@x.test"),
		`{"from":"Zoë <z@x.test>","to":"a@x.test","cc":["b@x.test","c@x.test"],"subject":"\"x\"","html":"<p class=\"a\">\n</p>","headers":{"X-A":"{"},"tags":[{"name":"a","value":"b"}]}`,
	} {
		var m mail
		require.True(t, m.scan([]byte(s)), s)
	}
	var m mail
	require.False(t, m.scan([]byte(strings.Repeat("[", 1000))))
}
