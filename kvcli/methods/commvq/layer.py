"""The type of CommVQ's codecs of one layer."""

from kvcli.methods.commvq.keys import CommVQKeyCodec
from kvcli.methods.commvq.values import CommVQValueCodec
from kvcli.methods.layer_codec import LayerCodec

CommVQLayer = LayerCodec[CommVQKeyCodec, CommVQValueCodec]
