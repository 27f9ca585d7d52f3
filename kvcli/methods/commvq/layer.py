"""The type of CommVQ's codecs of one layer."""

from kvcli.methods.base import LayerCodec
from kvcli.methods.commvq.keys import CommVQKeyCodec
from kvcli.methods.commvq.values import CommVQValueCodec

CommVQLayer = LayerCodec[CommVQKeyCodec, CommVQValueCodec]
