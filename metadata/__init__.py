"""Ground floor: what pages, pools and namespaces are, and the Redis side that remembers them.

Imports nothing of the floors above. The pure modules (`pools`, `namespace`, `object_keys`, `hit_policy`,
`page_hash`) hold every rule of the domain and can be read and tested without a server.
"""
