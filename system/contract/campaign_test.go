package contract

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The key is a promise to everybody who repeats a call: it is written out here,
// so that a change of the normalisation or of the hash is seen.
func TestCampaignKey(t *testing.T) {
	t.Parallel()
	const bob = "campaign:spring-26:5ff860bf1190596c7188ab851db691f0"
	for _, same := range []string{"bob@example.com", "Bob@Example.COM", "  bob@example.com\t"} {
		require.Equal(t, bob, CampaignKey("spring-26", same), same)
	}
	for _, other := range []string{"b.ob@example.com", "bob+tag@example.com", "bob@example.org"} {
		require.NotEqual(t, bob, CampaignKey("spring-26", other), other)
	}
	require.NotEqual(t, bob, CampaignKey("spring-27", "bob@example.com"))
}

func TestCheckCampaignID(t *testing.T) {
	t.Parallel()
	for _, good := range []string{"a", "spring-26", "2026.11_x", strings.Repeat("a", 100)} {
		require.NoError(t, CheckCampaignID(good), good)
		require.LessOrEqual(t, len(CampaignKey(good, "a@b")), 256)
	}
	for _, bad := range []string{"", "-a", ".a", "a b", "a:b", "a/b", "ä", "a\n", strings.Repeat("a", 101)} {
		require.Error(t, CheckCampaignID(bad), "%q", bad)
	}
}

func TestCampaignDataIsChecked(t *testing.T) {
	t.Parallel()
	good := CampaignData{Headline: "Half price", Text: "Tonight only.", Link: "https://example.test/x"}
	require.NoError(t, good.Validate())
	for name, spoil := range map[string]func(*CampaignData){
		"data.headline": func(d *CampaignData) { d.Headline = " \n" },
		"data.text":     func(d *CampaignData) { d.Text = "" },
		"U+0000":        func(d *CampaignData) { d.Name = "a\x00b" },
		"data.link":     func(d *CampaignData) { d.Link = "javascript:alert(1)" },
	} {
		d := good
		spoil(&d)
		require.ErrorContains(t, d.Validate(), name)
	}
}

func TestDecodeCampaignMail(t *testing.T) {
	t.Parallel()
	m, err := DecodeCampaignMail([]byte(`{"template":"offer","data":{"headline":"h","text":"t"},"later":1}`))
	require.NoError(t, err, "a field that this code does not know is passed over")
	require.Equal(t, CampaignMail{Template: "offer", Data: CampaignData{Headline: "h", Text: "t"}}, m)
	for _, bad := range []string{"", "{}", "[]", `{"template":1}`} {
		_, err := DecodeCampaignMail([]byte(bad))
		require.Error(t, err, bad)
	}
}
