package contract

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"strings"
)

// TemplateOffer is the template of a marketing mail.
const TemplateOffer = "offer"

// CampaignMail is the payload of a marketing mail's row: what is rendered, and
// with which template.
type CampaignMail struct {
	Template string       `json:"template"`
	Data     CampaignData `json:"data"`
}

// CampaignData is what one recipient of a campaign is shown.
type CampaignData struct {
	Headline string `json:"headline"` // the mail's subject too
	Text     string `json:"text"`     // paragraphs are separated by an empty line
	Name     string `json:"name,omitempty"`
	Locale   string `json:"locale,omitempty"`
	Link     string `json:"link,omitempty"` // where the offer is, http or https
}

// Validate names the first field that makes the mail unusable, or returns nil.
// The error holds no value of a field: they may be personal.
func (d CampaignData) Validate() error {
	switch {
	case strings.Contains(d.Headline+d.Text+d.Name+d.Locale+d.Link, "\x00"):
		return errors.New("data holds the character U+0000, which no database text can")
	case strings.TrimSpace(d.Headline) == "":
		return errors.New("data.headline is empty")
	case strings.TrimSpace(d.Text) == "":
		return errors.New("data.text is empty")
	case d.Link == "":
		return nil
	}
	const maxLink = 2000
	if u, err := url.Parse(d.Link); err != nil || len(d.Link) > maxLink || u.Host == "" || (u.Scheme != "https" && u.Scheme != "http") {
		return fmt.Errorf("data.link is no http or https URL of at most %d bytes", maxLink)
	}
	return nil
}

// DecodeCampaignMail reads the payload of a marketing mail's row.
func DecodeCampaignMail(payload []byte) (CampaignMail, error) {
	var m CampaignMail
	if err := json.Unmarshal(payload, &m); err != nil {
		return CampaignMail{}, fmt.Errorf("campaign mail: %w", err)
	}
	if m.Template == "" {
		return m, errors.New("campaign mail: template is empty")
	}
	return m, nil
}

// campaignID leaves out the colon, which ends the id in a key, and all that
// could not stand in a mail's header.
var campaignID = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$`)

// CheckCampaignID refuses an id that cannot be part of a dedupe key.
func CheckCampaignID(id string) error {
	if !campaignID.MatchString(id) {
		return errors.New("a campaign's id is 1 to 100 letters, digits, dots, hyphens or underscores, and begins with a letter or digit")
	}
	return nil
}

// CampaignKey is the dedupe key of one recipient's mail in a campaign:
// "campaign:<id>:<first 32 hex digits of the SHA-256 of the recipient>", with
// the recipient normalised by [NormaliseRecipient]. The same person listed twice
// gets one mail, and the key, which stands in logs and headers, shows no
// address. (A hash of an address can be guessed by whoever knows the address: it
// is a pseudonym, not a secret.)
func CampaignKey(id, recipient string) string {
	sum := sha256.Sum256([]byte(NormaliseRecipient(recipient)))
	return "campaign:" + id + ":" + hex.EncodeToString(sum[:16])
}

// NormaliseRecipient makes two spellings of an address one: white space around
// it is cut off and all letters are made lower case. RFC 5321 2.4 allows a server
// to tell "Bob" from "bob", and hardly one does: a double advertisement is the
// likelier mistake. Dots and "+tags" are kept, since what they mean is the
// server's own matter, and domains are not mapped to their ASCII form. It serves
// the key alone; the mail goes to the address as it was given.
func NormaliseRecipient(recipient string) string {
	return strings.ToLower(strings.TrimSpace(recipient))
}
